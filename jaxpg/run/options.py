"""Options of every run: where and how it is done."""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from jaxpg.parallel import distributed
from jaxpg.run import folder
from jaxpg.run.ranges import NonNegative, Positive


@dataclasses.dataclass(frozen=True)
class Options(distributed.Options):
    """Options that say how a run is done. None of them changes its result, so a run may be resumed with others."""

    run_dir: Path | None = None  # the folder of the run; default runs/<name of the experiment>
    resume: bool = False  # go on with the run that the folder holds, if there is one
    dry_run: bool = False  # print what the run would do and need, and end
    mesh: str = "data=-1"  # devices by axis, e.g. data=2,fsdp=2,tensor=2
    checkpoint_every: Positive = 25  # steps
    keep: Positive = 2  # newest checkpoints that stay
    keep_best: NonNegative = 1  # checkpoints with the best held-out accuracy that stay too
    max_nonfinite: NonNegative = 4  # consecutive steps that may skip an update whose loss or gradient is not finite
    track: tuple[str, ...] = ()  # tensorboard, wandb: where metrics go besides metrics.jsonl
    compilation_cache: bool = True  # keep compiled programs in the user's cache folder for the next start
    stop_after: Positive | None = None  # end this process abruptly after so many steps, like a power cut

    # Fields that do not tell one run from another; each class of options names its own.
    NOT_IDENTITY: ClassVar[tuple[str, ...]] = (
        *("run_dir", "resume", "dry_run", "mesh", "checkpoint_every", "keep", "keep_best", "max_nonfinite", "track"),
        *("compilation_cache", "stop_after", *distributed.OPTIONS),
    )


def identity(options: Options) -> dict[str, Any]:
    """The options that tell one run from another, as JSON values."""
    left_out = {name for cls in type(options).__mro__ for name in vars(cls).get("NOT_IDENTITY", ())}
    return folder.config_dict(options, without=tuple(left_out))
