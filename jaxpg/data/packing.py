"""Packing: several short documents in one row, so that few tokens of a batch are padding."""

import dataclasses

import numpy as np

from jaxpg.types import Batch


def pack(batch: Batch, *, length: int | None = None, rows: int | None = None) -> Batch:
    """Lays the documents of a batch, one a row, into as few rows as best fit, longest first, finds.

    The model keeps the documents of a row apart by `Batch.documents`: give them to `Model.hidden` or `Model.logits`.
    Loss and gradient are then those of the documents in rows of their own, for every aggregation over tokens; an
    average over rows (`aggregate.sequence_mean_*`) would take a packed row for one response.

    Args:
      batch: tokens, token_mask and action_mask [B, T] on the host, e.g. of `encode_demonstrations`; padding anywhere.
        The first token of a document must be no action: nothing would predict it.
      length: columns of the result; default T.
      rows: of the result, the last ones empty if there are more than it takes, so that many batches have one shape;
        default as many as it takes.

    Returns:
      A Batch [rows, length] of tokens, masks and `documents`, numbered from 0 in each row, each without a gap.

    Raises:
      ValueError: if a document is longer than `length`, the documents do not fit into `rows`, a document starts with
        an action, or the batch has other fields.
    """
    _check(batch)
    tokens, mask, actions = (np.asarray(x) for x in (batch.tokens, batch.token_mask, batch.action_mask))
    length = tokens.shape[1] if length is None else length
    documents = [
        (row_tokens[real], row_actions[real])
        for row_tokens, real, row_actions in zip(tokens, mask, actions, strict=True)
        if real.any()
    ]
    _check_documents(documents, length)
    places, needed = _best_fit([len(ids) for ids, _ in documents], length)
    rows = needed if rows is None else rows
    if needed > rows:
        raise ValueError(f"rows={rows}: these {len(documents)} documents take {needed} rows of {length} tokens")
    packed = Batch(
        tokens=np.zeros((rows, length), np.int32),
        token_mask=np.zeros((rows, length), bool),
        action_mask=np.zeros((rows, length), bool),
        documents=np.zeros((rows, length), np.int32),
    )
    for (ids, drawn), (row, start, number) in zip(documents, places, strict=True):
        part = np.s_[row, start : start + len(ids)]
        packed.tokens[part], packed.token_mask[part], packed.action_mask[part] = ids, True, drawn
        packed.documents[part] = number
    return packed


def _best_fit(lengths: list[int], room: int) -> tuple[list[tuple[int, int, int]], int]:
    """Row, first column and number of each document, longest placed first and where least is left; and the rows."""
    places: list[tuple[int, int, int]] = [(0, 0, 0)] * len(lengths)
    open_rows: list[list[tuple[int, int]]] = [[] for _ in range(room + 1)]  # by what is left: (row, documents in it)
    used = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        left = next((left for left in range(lengths[i], room + 1) if open_rows[left]), None)
        if left is None:
            left, (row, number), used = room, (used, 0), used + 1
        else:
            row, number = open_rows[left].pop(0)
        places[i] = (row, room - left, number)
        open_rows[left - lengths[i]].append((row, number + 1))
    return places, used


def _check(batch: Batch) -> None:
    names = ("tokens", "token_mask", "action_mask")
    more = [
        field.name
        for field in dataclasses.fields(batch)
        if field.name not in names and getattr(batch, field.name) is not None
    ]
    if more:
        raise ValueError(f"batch has {', '.join(more)}: only {', '.join(names)} can be packed")


def _check_documents(documents: list[tuple[np.ndarray, np.ndarray]], length: int) -> None:
    for ids, actions in documents:
        if len(ids) > length:
            raise ValueError(f"length={length}: a document has {len(ids)} tokens, raise it or shorten the document")
        if actions[0]:
            raise ValueError(f"a document starts with an action, {ids[0]}: give it a prompt, or nothing predicts that")
