from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ConnectRequest(_message.Message):
    __slots__ = ("protocol_version", "fingerprint_record", "clock_seconds", "router")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_RECORD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    fingerprint_record: bytes
    clock_seconds: float
    router: str
    def __init__(self, protocol_version: _Optional[int] = ..., fingerprint_record: _Optional[bytes] = ..., clock_seconds: _Optional[float] = ..., router: _Optional[str] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("protocol_version", "fingerprint_record", "clock_seconds", "session", "error")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_RECORD_FIELD_NUMBER: _ClassVar[int]
    CLOCK_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    fingerprint_record: bytes
    clock_seconds: float
    session: str
    error: bytes
    def __init__(self, protocol_version: _Optional[int] = ..., fingerprint_record: _Optional[bytes] = ..., clock_seconds: _Optional[float] = ..., session: _Optional[str] = ..., error: _Optional[bytes] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("status_records", "freed_workers")
    STATUS_RECORDS_FIELD_NUMBER: _ClassVar[int]
    FREED_WORKERS_FIELD_NUMBER: _ClassVar[int]
    status_records: _containers.RepeatedScalarFieldContainer[bytes]
    freed_workers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, status_records: _Optional[_Iterable[bytes]] = ..., freed_workers: _Optional[_Iterable[str]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("worker", "attempt_record")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_RECORD_FIELD_NUMBER: _ClassVar[int]
    worker: str
    attempt_record: bytes
    def __init__(self, worker: _Optional[str] = ..., attempt_record: _Optional[bytes] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation_record", "error")
    RESERVATION_RECORD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reservation_record: bytes
    error: bytes
    def __init__(self, reservation_record: _Optional[bytes] = ..., error: _Optional[bytes] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("worker", "attempt_record", "reservation_record")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_RECORD_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_RECORD_FIELD_NUMBER: _ClassVar[int]
    worker: str
    attempt_record: bytes
    reservation_record: bytes
    def __init__(self, worker: _Optional[str] = ..., attempt_record: _Optional[bytes] = ..., reservation_record: _Optional[bytes] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("result_record", "error")
    RESULT_RECORD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    result_record: bytes
    error: bytes
    def __init__(self, result_record: _Optional[bytes] = ..., error: _Optional[bytes] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("worker", "attempt_id", "first_token_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    attempt_id: str
    first_token_id: int
    def __init__(self, worker: _Optional[str] = ..., attempt_id: _Optional[str] = ..., first_token_id: _Optional[int] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("event_record", "error")
    EVENT_RECORD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    event_record: bytes
    error: bytes
    def __init__(self, event_record: _Optional[bytes] = ..., error: _Optional[bytes] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("worker", "attempt_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    worker: str
    attempt_id: str
    def __init__(self, worker: _Optional[str] = ..., attempt_id: _Optional[str] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: bytes
    def __init__(self, error: _Optional[bytes] = ...) -> None: ...

class TellPrefixesRequest(_message.Message):
    __slots__ = ("worker", "incarnation", "sequence")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    sequence: int
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class TellPrefixesResponse(_message.Message):
    __slots__ = ("changes_record", "error")
    CHANGES_RECORD_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    changes_record: bytes
    error: bytes
    def __init__(self, changes_record: _Optional[bytes] = ..., error: _Optional[bytes] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: str
    def __init__(self, worker: _Optional[str] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: bytes
    def __init__(self, error: _Optional[bytes] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("worker", "role")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: str
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[str] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: bytes
    def __init__(self, error: _Optional[bytes] = ...) -> None: ...

class SetPeersRequest(_message.Message):
    __slots__ = ("peers_record",)
    PEERS_RECORD_FIELD_NUMBER: _ClassVar[int]
    peers_record: bytes
    def __init__(self, peers_record: _Optional[bytes] = ...) -> None: ...

class SetPeersResponse(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: bytes
    def __init__(self, error: _Optional[bytes] = ...) -> None: ...

class LogitsRequest(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class LogitsResponse(_message.Message):
    __slots__ = ("data", "vocab_size", "error")
    DATA_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    vocab_size: int
    error: bytes
    def __init__(self, data: _Optional[bytes] = ..., vocab_size: _Optional[int] = ..., error: _Optional[bytes] = ...) -> None: ...
