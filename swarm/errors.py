"""Every error that the swarm raises on purpose.

::

    SwarmError                       exit  at fault, or cause     does a retry help?
    ├── ConfigError                   2    the caller             no: change the named value
    │   └── AddressError              2    the caller             no: write HOST:PORT[#PEER_ID]
    ├── RequestError                  2    the HTTP caller        no: change the named parameter; 429: yes
    ├── PackageError                  4    the package's files    no: fetch or export again
    │   ├── DamagedFile               4    the named file         after it was replaced
    │   └── UnsupportedModel          4    the model              no: it cannot be split into parts
    ├── EngineError                   5    this machine           no: the client does not repair it
    ├── DirectoryError                6    the DHT                yes: later, or with another initial peer
    ├── RouteError                    3    no route
    │   ├── NotCovered                3    layers are missing     when a peer joins
    │   ├── UnknownModel              3    no such name           when a peer serves it
    │   └── MixedModels               3    one name, two digests  no: name the digest
    ├── ProtocolError
    │   ├── LocalProtocolError        5    this program           no
    │   └── RemoteProtocolError       7    the other side         on another peer
    ├── StepError                          the step's sender      no: the step is wrong
    │   ├── BadStep                   5    malformed step         no
    │   ├── UnknownSession            7    expired or restarted   yes: open it again, send the known tokens
    │   └── ContextExceeded           8    the text is too long   no: shorten it
    └── PeerError                     7    the named peer         yes: on another peer
        ├── PeerUnreachable                no connection
        ├── PeerLost                       the connection broke
        ├── PeerStalled                    a deadline passed
        ├── PeerBusy                       no room                yes: after `retry_after` seconds
        ├── PeerLeaving                    the peer announced that it stops
        ├── PeerFailed                     an error on the peer (device, disk, bug)
        └── WrongPeer                      another key than expected at this address

`code` identifies the error on the wire (`wire.messages.Failure`). `exit_code` is the exit code of the command
(`swarm/app/main.py` exits with it).
An exception outside this tree is a bug of this program and is never attributed to a peer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar


class SwarmError(Exception):
    """The base class. `str(error)` is one sentence for a person: what happened and what to do next."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class ConfigError(SwarmError):
    code = "config"
    exit_code = 2


class AddressError(ConfigError):
    code = "address"


class RequestError(SwarmError):
    """The gateway refuses an HTTP request with `status`. `reason` is one word; `param` names the parameter.
    `retry_after` is in seconds."""

    code = "request"
    exit_code = 2

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        reason: str = "invalid_value",
        param: str | None = None,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.param = param
        self.retry_after = retry_after


class PackageError(SwarmError):
    code = "package"
    exit_code = 4


class DamagedFile(PackageError):
    code = "damaged_file"


class UnsupportedModel(PackageError):
    code = "unsupported_model"


class EngineError(SwarmError):
    code = "engine"
    exit_code = 5


class DirectoryError(SwarmError):
    code = "directory"
    exit_code = 6
    retryable = True


class RouteError(SwarmError):
    code = "route"
    exit_code = 3
    retryable = True


class NotCovered(RouteError):
    """No peer serves the layers in `missing`, which holds half-open (first, last) pairs. With `full`, peers serve
    them but have no room now."""

    code = "not_covered"

    def __init__(self, message: str, missing: Iterable[tuple[int, int]] = (), *, full: bool = False) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.full = full


class UnknownModel(RouteError):
    code = "unknown_model"


class MixedModels(RouteError):
    code = "mixed_models"
    retryable = False


class ProtocolError(SwarmError):
    code = "protocol"


class LocalProtocolError(ProtocolError):
    code = "local_protocol"
    exit_code = 5


class RemoteProtocolError(ProtocolError):
    code = "remote_protocol"
    exit_code = 7
    retryable = True


class StepError(SwarmError):
    code = "step"
    exit_code = 5


class BadStep(StepError):
    code = "bad_step"


class UnknownSession(StepError):
    code = "unknown_session"
    exit_code = 7
    retryable = True


class ContextExceeded(StepError):
    code = "context_exceeded"
    exit_code = 8


class PeerError(SwarmError):
    """`peer` is the id of the peer at fault, empty if unknown. `retry_after` is in seconds."""

    code = "peer"
    exit_code = 7
    retryable = True

    def __init__(self, message: str, *, peer: str = "", retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.peer = peer
        self.retry_after = retry_after


class PeerUnreachable(PeerError):
    code = "peer_unreachable"


class PeerLost(PeerError):
    code = "peer_lost"


class PeerStalled(PeerError):
    code = "peer_stalled"


class PeerBusy(PeerError):
    code = "peer_busy"


class PeerLeaving(PeerError):
    code = "peer_leaving"


class PeerFailed(PeerError):
    code = "peer_failed"


class WrongPeer(PeerError):
    code = "wrong_peer"


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show of tasks that failed together: a bug if there is one, else the first SwarmError."""
    errors = [first_error(error) if isinstance(error, BaseExceptionGroup) else error for error in group.exceptions]
    return min(errors, key=lambda error: isinstance(error, SwarmError))
