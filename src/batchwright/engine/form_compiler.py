"""`FormCompiler`: compiles the forms of answers ahead, on a thread beside the engine's steps."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from batchwright.engine.grammars import Form, Grammars
from batchwright.errors import EngineClosed
from batchwright.request import InferenceRequest


class FormCompiler:
    """Compiler of the forms that requests ask for, one at a time on its own thread.

    A request waits for its own form before it is handed to the engine, which meanwhile computes others.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batchwright-forms")
        self._closed = False

    async def form_of(self, request: InferenceRequest) -> Form | None:
        """Return the compiled form of a request's answers, None if it asks for none; at once if it is compiled already.

        Raises `EngineClosed` after `close`, also for a form that had not had its turn by then.
        """
        constraint = request.constraint
        if constraint is None:
            return None
        form = self._grammars.form(constraint)
        if not form.is_compiled:
            try:
                compiling = self._thread.submit(self._compile, form)
            except RuntimeError as error:  # the thread has been shut down
                raise _closed() from error
            await asyncio.wrap_future(compiling)
            if self._closed:
                raise _closed()
        return form

    def close(self) -> None:
        """Compile nothing more. Does not wait for a form that is being compiled. May be called repeatedly."""
        self._closed = True
        self._thread.shutdown(wait=False)

    def _compile(self, form: Form) -> None:
        # Queued forms are not needed any more, and the program would wait for them before it exits.
        if self._closed:
            raise _closed()
        form.compile()


def _closed() -> EngineClosed:
    return EngineClosed("the engine is closed")
