"""Rollouts and their rewards: in turn, or at the same time (``rollout.overlap``, ``rollout.steps_ahead``).

What the device (above) and the host (below) do, from left to right; in turn, with overlap, one step ahead::

    rollout 1             update 1 | rollout 2             update 2
              rewards 1            |           rewards 2

    part 1 | part 2   | part 3               update 1 | ...
             rewards  | rewards  | rewards            |

    rollout 2   update 1 | rollout 3   update 2 | ...
    rewards 1            | rewards 2            |

Reward functions and verdicts alone run in the other thread: programs and collectives are dispatched by this one,
so that all hosts do so in one order.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType

import jax

from grpo_jax.tasks.base import Example
from grpo_jax.train.progress import Progress, RolloutAhead, abstract_rollout
from grpo_jax.train.report import StageClock
from grpo_jax.train.sample import Sample, join_samples, judge_rollout
from grpo_jax.train.session import Session
from grpo_jax.types import Array, Rollout

Job = Callable[[], Sample]


class SampleSource:
    """Samples and judges the batches of a run, one a step; each step calls :meth:`begin`, then :meth:`finish`.

    Args:
        session: the run's.
        progress: where the run stands; a rollout ahead is put there, and taken from there.
        clock: gives every second of the loop to one stage.
    """

    def __init__(self, session: Session, progress: Progress, clock: StageClock) -> None:
        self.seconds: dict[str, float] = {}
        """Of the step that was begun last; a stage's name, ``RolloutWait``, ``RewardWait`` or ``RewardRun``."""
        self._session = session
        self._progress = progress
        self._clock = clock
        rollout = session.config.rollout
        self._num_parts = rollout.num_parts
        self._is_ahead = rollout.steps_ahead > 0
        # In turn, rewards run in this thread: those that rely on signals have no other.
        self._thread = RewardThread() if rollout.overlap or self._is_ahead else None
        self._parts: list[tuple[list[Example], Rollout]] = []
        self._judging: list[Future[Sample]] = []

    def __enter__(self) -> SampleSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._thread is not None:
            # Whoever wants the run to end at once doesn't want to wait for a slow reward function either.
            self._thread.close(timeout=1.0 if kind is KeyboardInterrupt else None)

    def begin(self) -> None:
        """Give the device its work: the step's rollout, or the next step's beside this one's rewards."""
        self.seconds = defaultdict(float)
        progress = self._progress
        step = progress.done + 1
        if self._is_ahead:
            here = progress.ahead or self._roll_out_ahead(step)
            self._wait(here.rollout)
            progress.ahead = self._roll_out_ahead(step + 1)
            self._judging = [self._judge(here.examples, here.rollout)]
        else:
            self._parts = self._roll_out(progress.step_key(step))
        self.seconds["Rollout"] += self._clock.lap()

    def finish(self) -> Sample:
        """The step's completions, judged; the device has nothing left to do."""
        if self._progress.ahead is not None:
            # Not only for the clock: the update takes the place of the parameters that this rollout reads.
            self._wait(self._progress.ahead.rollout)
            self.seconds["Rollout"] += self._clock.lap()
        else:
            self._judging = [self._judge(*part) for part in self._parts]
        return self._judged(self._judging)

    def draw(self, key: Array) -> Sample:
        """One more batch of the policy as it is, of the next prompts."""
        return self._judged([self._judge(*part) for part in self._roll_out(key)])

    def _roll_out(self, key: Array) -> list[tuple[list[Example], Rollout]]:
        """Dispatch all parts of a batch; the device takes one after the other."""
        examples, N = next(self._session.prompts), self._num_parts
        params = self._progress.state.params
        return [
            (examples[part::N], self._session.roll_out(params, examples[part::N], key, part=part))
            for part in range(N)
        ]

    def _roll_out_ahead(self, step: int) -> RolloutAhead:
        position = self._session.prompts.position()
        [(examples, rollout)] = self._roll_out(self._progress.step_key(step))
        # As a checkpoint's will lie: what is computed from it must be the same to the bit.
        shardings = jax.tree.map(lambda x: x.sharding, abstract_rollout(self._session))
        return RolloutAhead(examples, jax.device_put(rollout, shardings), position)

    def _wait(self, rollout: Rollout) -> None:
        start = time.perf_counter()
        jax.block_until_ready(rollout)
        self.seconds["RolloutWait"] += time.perf_counter() - start

    def _judge(self, examples: list[Example], rollout: Rollout) -> Future[Sample]:
        """Wait for completions, and have them judged."""
        self._wait(rollout)
        completions = self._session.policy.sampler.to_host(rollout)
        self.seconds["Rollout"] += self._clock.lap()
        job = functools.partial(judge_rollout, self._session, examples, rollout, completions)
        judging = _at_once(job) if self._thread is None else self._thread.submit(job)
        self._count_reward_wait()
        return judging

    def _judged(self, judging: list[Future[Sample]]) -> Sample:
        parts = [future.result() for future in judging]
        self._count_reward_wait()
        sample = join_samples(self._session, parts)
        self.seconds["RewardRun"] += sample.judged_in
        return sample

    def _count_reward_wait(self) -> None:
        seconds = self._clock.lap()
        self.seconds["Reward"] += seconds
        self.seconds["RewardWait"] += seconds


def _at_once(job: Job) -> Future[Sample]:
    future: Future[Sample] = Future()
    future.set_result(job())
    return future


class RewardThread:
    """A thread that does one job after the other; what a job raises is raised where its result is asked for."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Future[Sample]] | None] = queue.SimpleQueue()
        self._closed = False
        # A daemon: Ctrl-C ends the process, whatever a reward function waits for.
        self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Future[Sample]:
        """Do ``job`` after those before it."""
        future: Future[Sample] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for the job that is being done, at most so many seconds; those after it are dropped."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(timeout)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None and not self._closed:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # also SystemExit: it is the run's, not the thread's
                future.set_exception(error)
