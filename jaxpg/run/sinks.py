"""Where metrics go besides the run's own metrics.jsonl: TensorBoard, Weights & Biases, or a sink of one's own.

A sink has two methods. This one prints, and `sinks.FACTORIES["print"] = Print` makes it known:

    class Print:
        def __init__(self, folder, name, config): ...
        def write(self, step, row): print(step, row)
        def close(self): ...
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol


class Sink(Protocol):
    """Takes the numbers of each step."""

    def write(self, step: int, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes event files into the run's folder, for `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, name: str, config: dict):
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for key, value in row.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Logs to Weights & Biases; a resumed run goes on under the same id."""

    def __init__(self, folder: Path, name: str, config: dict):
        import wandb

        key = "".join(c if c.isalnum() else "-" for c in str(folder))
        self._run = wandb.init(project="jaxpg", name=name, id=key, resume="allow", config=config, dir=str(folder))
        # Its own steps may only rise, but each phase counts from 1, and a resumed run repeats some.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step", step_sync=True)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log({**row, "step": step})

    def close(self) -> None:
        self._run.finish()


FACTORIES: dict[str, Callable[[Path, str, dict], Sink]] = {"tensorboard": TensorBoard, "wandb": WandB}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check(names: Sequence[str]) -> None:
    """Raises ValueError for a sink that does not exist, or whose package is not installed."""
    import importlib.util

    for name in names:
        if name not in FACTORIES:
            raise ValueError(f"--track {name}: choose among {', '.join(FACTORIES)}")
        if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
            raise ValueError(f"--track {name}: {PACKAGES[name]} is not installed, pip install 'jaxpg[track]'")


class Sinks:
    """Several sinks as one. A sink that fails is left out with a warning: it never ends a run."""

    def __init__(self, names: Sequence[str], folder: Path, name: str, config: dict):
        self._sinks: dict[str, Sink] = {}
        for sink in names:
            with _Tolerated(self._sinks, sink):
                self._sinks[sink] = FACTORIES[sink](folder, name, config)

    def write(self, phase: str, step: int, row: Mapping[str, object]) -> None:
        """Hands the numbers of a row to every sink, under "<phase>/<name>"."""
        numbers = {f"{phase}/{key}": float(x) for key, x in row.items() if isinstance(x, int | float)}
        for name, sink in list(self._sinks.items()):
            with _Tolerated(self._sinks, name):
                sink.write(step, numbers)

    def close(self) -> None:
        for name, sink in list(self._sinks.items()):
            with _Tolerated(self._sinks, name):
                sink.close()


class _Tolerated:
    """Turns an error of a sink into a warning, and drops the sink."""

    def __init__(self, sinks: dict[str, Sink], name: str):
        self._sinks, self._name = sinks, name

    def __enter__(self) -> None: ...

    def __exit__(self, kind, error, traceback) -> bool:
        if not isinstance(error, Exception):
            return False
        self._sinks.pop(self._name, None)
        warnings.warn(f"--track {self._name} failed and is left out: {type(error).__name__}: {error}", stacklevel=3)
        return True
