"""Every error that clearhead raises on purpose.

One small tree, so that a caller can catch all of it (`ClearheadError`) or one kind. Each kind is also
the built-in error that a Python programmer would expect, and each message names the argument, what came
and what is allowed.

    ClearheadError
    ├── ShapeError         (ValueError)    a tensor of the wrong rank or size
    ├── DTypeError         (TypeError)     a dtype that is not supported, or two that do not go together
    ├── DeviceError        (ValueError)    tensors on different devices
    ├── ArgumentError      (ValueError)    a value outside what is allowed
    │   ├── MaskError                      a mask that contradicts itself or does not fit the tensors
    │   └── ObserveError                   an observable that cannot be computed as asked
    ├── SizeError          (MemoryError)   something quadratic was asked for at a size that would not fit
    ├── PoolFullError      (MemoryError)   a cache has no block left for what is to be written
    ├── EngineError        (RuntimeError)  an engine that is closed, or a request that it could not finish
    ├── BackendError       (RuntimeError)  no backend, or not the one asked for, can do this
    ├── PromptError        (ValueError)    segments that cannot be laid out as a prompt
    ├── ModelError         (RuntimeError)  a model that cannot be found, loaded or observed
    ├── GuardError         (ValueError)    a text that cannot be scanned, or a calibration of another model
    ├── ReadingError       (ValueError)    a file whose text cannot be read, or not within the limits
    ├── TraceError         (ValueError)    a trace, or a trace file, that does not hold what was asked for
    └── MissingExtraError  (ImportError)   an optional dependency is not installed
"""


class ClearheadError(Exception):
    """The root of all errors of this library."""


class ShapeError(ClearheadError, ValueError):
    """A tensor has the wrong rank or size."""


class DTypeError(ClearheadError, TypeError):
    """A dtype is not supported, or two dtypes do not go together."""


class DeviceError(ClearheadError, ValueError):
    """Tensors that must share a device do not."""


class ArgumentError(ClearheadError, ValueError):
    """A value lies outside what is allowed."""


class MaskError(ArgumentError):
    """A mask contradicts itself or does not fit the tensors it is used with."""


class ObserveError(ArgumentError):
    """An observable cannot be computed as asked."""


class SizeError(ClearheadError, MemoryError):
    """Something quadratic was asked for at a size that would not fit."""


class PoolFullError(ClearheadError, MemoryError):
    """A cache has no block left for what was to be written; what is in it is as it was."""


class EngineError(ClearheadError, RuntimeError):
    """An engine is closed, or could not finish a request."""


class BackendError(ClearheadError, RuntimeError):
    """No backend, or not the one asked for, can do this."""


class PromptError(ClearheadError, ValueError):
    """Segments cannot be laid out as a prompt."""


class ModelError(ClearheadError, RuntimeError):
    """A model cannot be found, loaded or observed."""


class ReadingError(ClearheadError, ValueError):
    """The text of a file cannot be read, or not within the limits."""


class GuardError(ClearheadError, ValueError):
    """A text that cannot be scanned, or a calibration that does not fit the model."""


class TraceError(ClearheadError, ValueError):
    """A trace, or a trace file, does not hold what was asked for."""


class MissingExtraError(ClearheadError, ImportError):
    """An optional dependency is not installed."""
