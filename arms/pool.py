"""An in-process arm that serves several requests at once: the server's scheduler without HTTP."""

from __future__ import annotations

import itertools
import queue
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from arms.inprocess import InProcessArm
from arms.protocol import ArmRequest, ArmResult
from arms.spec import ArmSpec
from lumotree.request import SamplingParams

if TYPE_CHECKING:
    from lumotree.engine import Engine

FOREVER_S = 1e9


class PooledArm(InProcessArm):
    """`run` may be called from several threads; `active` requests are decoded in turn and the
    rest waits. Times are the caller's: waiting counts. `context`: positions that the longest
    request takes, answer included.
    """

    def __init__(self, spec: ArmSpec, engine: Engine, active: int) -> None:
        super().__init__(spec, engine)
        self._active = active
        self._scheduler = None
        self.context = engine.max_context

    def start(self) -> dict[str, Any]:
        from lumotree.prefix import PrefixStore
        from lumotree.serve.metrics import Metrics
        from lumotree.serve.scheduler import Scheduler
        from lumotree.serve.slots import make_slots

        description = super().start()
        self._store = PrefixStore()
        slots = make_slots(self._engine, self.config, self._active, self.context, self._store)
        # Callers wait for their answers, so the queue is as long as there are callers.
        self._scheduler = Scheduler(slots, queue=1 << 20, metrics=Metrics())
        self._scheduler.start()
        return {**description, "active": self._active}

    def new_run(self) -> None:
        super().new_run()
        self._store.clear()

    def run(self, request: ArmRequest, params: SamplingParams) -> ArmResult:
        from lumotree.serve.errors import ApiError
        from lumotree.serve.scheduler import Job, Tokens

        inbox: queue.SimpleQueue = queue.SimpleQueue()
        began, times = time.perf_counter(), []
        deadline = time.monotonic() + FOREVER_S
        self._scheduler.submit([Job(request.prompt_ids, params, inbox.put, deadline)])
        while isinstance(what := inbox.get(), Tokens):
            if what.ids:
                times.append(time.perf_counter() - began)
        if isinstance(what, ApiError):
            return ArmResult.failed(what.message)
        result = ArmResult.from_generation(what.generation)
        # A lone end-of-text token is counted and not handed out: then nothing has come.
        times = times or [time.perf_counter() - began]
        gaps = tuple(round(b - a, 6) for a, b in itertools.pairwise(times))
        return replace(result, ttft_s=times[0], e2e_s=times[-1], burst_s=gaps)

    def close(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()
            self._scheduler.join()
        super().close()
