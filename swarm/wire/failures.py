"""Errors to Failure messages and back.

`failure_to_error` gives the error from the receiver's side. An error of the sender's own machine (its device, its
files, its bugs) becomes `PeerFailed`. A RemoteProtocolError about our bytes becomes a LocalProtocolError: our bug.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm import errors
from swarm.errors import (
    DirectoryError,
    LocalProtocolError,
    NotCovered,
    PeerError,
    PeerFailed,
    ProtocolError,
    RemoteProtocolError,
    RouteError,
    StepError,
    SwarmError,
)
from swarm.wire.base_message import MAX_TEXT
from swarm.wire.messages import MAX_DETAIL_VALUES, Failure

MAX_RETRY_AFTER_S = 3600.0


def error_to_failure(
    error: SwarmError, *, request: int = 0, session: str = "", epoch: int = 0, step: int = 0
) -> Failure:
    """Convert `error` to a Failure of a request, of a step, or (with neither) of the whole connection."""
    missing = error.missing if isinstance(error, NotCovered) else ()
    return Failure(
        code=error.code,
        text=str(error)[:MAX_TEXT],
        request=request,
        session=session,
        epoch=epoch,
        step=step,
        peer=error.peer if isinstance(error, PeerError) else "",
        retry_after=_bounded(error.retry_after) if isinstance(error, PeerError) else 0.0,
        detail={"missing": [edge for pair in missing for edge in pair][:MAX_DETAIL_VALUES]} if missing else {},
    )


def failure_to_error(failure: Failure, sender: str) -> SwarmError:
    """Convert a `failure` from the peer `sender` to the error that it is on this side."""
    text = printable(failure.text)
    peer = failure.peer or sender
    if failure.code == RemoteProtocolError.code:
        return LocalProtocolError(f"peer {sender[:8]} refused what it was sent: {text}")
    if failure.code == ProtocolError.code:
        return RemoteProtocolError(text)
    kind = _CODES.get(failure.code)
    if kind is None:
        return PeerFailed(f"peer {peer[:8]} failed: {text}", peer=peer)
    if issubclass(kind, PeerError):
        return kind(text, peer=peer, retry_after=_bounded(failure.retry_after))
    if issubclass(kind, NotCovered):
        return kind(text, _missing_layers(failure))
    return kind(text)


def as_peer_error(peer: str, error: SwarmError, *unchanged: type[SwarmError]) -> SwarmError:
    """Return `error` if it is a PeerError or one of `unchanged`, else a PeerFailed of `peer` with the same text.

    A peer chooses the code of its answer. With this, no code makes its failure look like an error of this program.
    """
    return error if isinstance(error, (PeerError, *unchanged)) else PeerFailed(str(error), peer=peer)


def _bounded(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)


def printable(text: str) -> str:
    """Replace non-printable characters: text from another machine must not control the terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _missing_layers(failure: Failure) -> list[tuple[int, int]]:
    edges = failure.detail.get("missing", ())
    if not isinstance(edges, (list, tuple)):
        return []
    numbers = [edge for edge in edges if isinstance(edge, int)]
    return [(first, last) for first, last in zip(numbers[::2], numbers[1::2], strict=False) if 0 <= first < last]


def _subtree(kind: type[SwarmError]) -> Iterator[type[SwarmError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from _subtree(child)


_CODES = {kind.code: kind for base in (RouteError, StepError, DirectoryError, PeerError) for kind in _subtree(base)}
"""Errors with the same meaning on both sides. All other codes are errors of the sender's own machine."""
