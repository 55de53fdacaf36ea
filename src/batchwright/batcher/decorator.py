"""`@batched`: turns a function of a list into a function of one item, whose concurrent calls are computed together."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Self, TypeVar, cast, overload

from batchwright.batcher.batcher import Batcher
from batchwright.policies import BatchPolicy

In = TypeVar("In")
Out = TypeVar("Out")


class _Batched(Generic[In, Out]):
    """A decorated function, or one instance's decorated method."""

    def __init__(
        self,
        function: Callable[..., Any],
        make: Callable[[Callable[..., Any]], Batcher],
        owner: Any = None,
        batcher: Batcher | None = None,
    ) -> None:
        functools.update_wrapper(cast("Callable[..., Any]", self), function)
        self._function = function
        self._make = make
        self._owner = owner
        """The instance of a method. A bound method keeps its instance alive; the instance's batcher does not."""
        self._batcher = batcher
        self._making = threading.Lock()
        self._of_instances: dict[int, tuple[weakref.ref[Any], Batcher]] = {}

    @property
    def batcher(self) -> Batcher:
        """The batcher behind the function, for `stats()` and `close()`."""
        with self._making:
            if self._batcher is None:
                self._batcher = self._make(self._function)
            return self._batcher

    def submit(self, item: In, **options: Any) -> concurrent.futures.Future[Out]:
        """Return the output for `item` as a future, for threads. `options` as in `Batcher.compute`."""
        future: concurrent.futures.Future[Out] = self.batcher.submit_item(item, **options)
        if self._owner is not None:
            future.add_done_callback(functools.partial(_keep, self._owner))
        return future

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        if instance is None:
            return self
        return type(self)(self._function, self._make, instance, self._batcher_of(instance))

    def _batcher_of(self, instance: Any) -> Batcher:
        key = id(instance)
        known = self._of_instances.get(key)
        if known is not None:
            return known[1]
        try:
            reference = weakref.ref(instance, lambda _: self._of_instances.pop(key, None))
        except TypeError as error:
            raise TypeError(
                f"@batched on a method of {type(instance).__name__}: its instances cannot be weakly referenced, add "
                "'__weakref__' to its __slots__"
            ) from error
        batcher = self._make(_method_of(reference, self._function))
        return self._of_instances.setdefault(key, (reference, batcher))[1]


class AsyncBatched(_Batched[In, Out]):
    """A decorated async function: `await f(item)`."""

    async def __call__(self, item: In, **options: Any) -> Out:
        output: Out = await self.batcher.compute(item, **options)
        return output


class SyncBatched(_Batched[In, Out]):
    """A decorated function: `f(item)` blocks its thread until the output is available; `submit` does not."""

    def __call__(self, item: In, **options: Any) -> Out:
        return self.submit(item, **options).result()


class Decorator:
    """The result of `batched(...)`: decorates functions and methods."""

    def __init__(self, policy: Callable[[], BatchPolicy] | None, options: dict[str, Any]) -> None:
        self._policy = policy
        self._options = options
        # Errors in the settings are raised here, not at the first call.
        self._batcher(list)

    @overload
    def __call__(self, function: Callable[[list[In]], Awaitable[Sequence[Out]]]) -> AsyncBatched[In, Out]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[In]], Awaitable[Sequence[Out]]]) -> AsyncBatched[In, Out]: ...
    @overload
    def __call__(self, function: Callable[[list[In]], Sequence[Out]]) -> SyncBatched[In, Out]: ...
    @overload
    def __call__(self, function: Callable[[Any, list[In]], Sequence[Out]]) -> SyncBatched[In, Out]: ...
    def __call__(self, function: Callable[..., Any]) -> Any:
        if not callable(function):
            raise TypeError(f"@batched on {type(function).__name__}: must decorate a function of a list")
        kind = AsyncBatched if inspect.iscoroutinefunction(function) else SyncBatched
        return kind(function, self._batcher)

    def _batcher(self, model: Callable[..., Any]) -> Batcher:
        return Batcher(model, "auto" if self._policy is None else self._policy(), **self._options)


def batched(policy: Callable[[], BatchPolicy] | None = None, **options: Any) -> Decorator:
    """Turn a function from a list of items to the list of their outputs into one that is called with a single item.

        @batched()
        async def embed(texts: list[str]) -> list[Vector]: ...

        vector = await embed("one text") # computed together with all concurrent calls

    `policy` creates a policy from `batchwright.policies` (`policy=lambda: length_aware(8192)`); the default is "auto".
    `options` are those of `Batcher`. A sync function is called from threads and blocks them. For a method, each
    instance has its own batcher, which ends with the instance. Raises the errors of `Batcher` for its options.
    """
    if policy is not None and (not callable(policy) or hasattr(policy, "decide")):
        raise TypeError("policy: give a function that makes one, since each batcher needs its own: lambda: simple(8)")
    if policy is not None and _needs_arguments(policy):
        raise TypeError(f"@batched on {getattr(policy, '__name__', policy)}: write @batched(), with parentheses")
    return Decorator(policy, options)


def _needs_arguments(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:
        # This is unknown for some built-in functions.
        return False
    return False


def _method_of(reference: weakref.ref[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Bind `function` to an instance without keeping the instance alive."""

    def instance() -> Any:
        found = reference()
        if found is None:
            raise ReferenceError(f"{function.__qualname__}: its instance is gone")
        return found

    if inspect.iscoroutinefunction(function):

        async def call_async(items: list[Any]) -> Any:
            return await function(instance(), items)

        return call_async
    return lambda items: function(instance(), items)


def _keep(owner: Any, future: concurrent.futures.Future[Any]) -> None:
    """Keep the instance alive for as long as a future of its batcher is."""
