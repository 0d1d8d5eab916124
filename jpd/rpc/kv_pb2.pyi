from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class OfferRequest(_message.Message):
    __slots__ = ("notice_record",)
    NOTICE_RECORD_FIELD_NUMBER: _ClassVar[int]
    notice_record: bytes
    def __init__(self, notice_record: _Optional[bytes] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("is_known",)
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    is_known: bool
    def __init__(self, is_known: _Optional[bool] = ...) -> None: ...

class AskRequest(_message.Message):
    __slots__ = ("request_record",)
    REQUEST_RECORD_FIELD_NUMBER: _ClassVar[int]
    request_record: bytes
    def __init__(self, request_record: _Optional[bytes] = ...) -> None: ...

class AskResponse(_message.Message):
    __slots__ = ("is_known",)
    IS_KNOWN_FIELD_NUMBER: _ClassVar[int]
    is_known: bool
    def __init__(self, is_known: _Optional[bool] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("offer_id",)
    OFFER_ID_FIELD_NUMBER: _ClassVar[int]
    offer_id: str
    def __init__(self, offer_id: _Optional[str] = ...) -> None: ...

class PullResponse(_message.Message):
    __slots__ = ("array", "start", "data", "ticket")
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    array: int
    start: int
    data: bytes
    ticket: int
    def __init__(self, array: _Optional[int] = ..., start: _Optional[int] = ..., data: _Optional[bytes] = ..., ticket: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("offer_ids",)
    OFFER_IDS_FIELD_NUMBER: _ClassVar[int]
    offer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, offer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("offer_ids",)
    OFFER_IDS_FIELD_NUMBER: _ClassVar[int]
    offer_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, offer_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
