import threading
import time

import numpy as np
import pytest
import torch

from dflash_cache.target.capture import capture_states
from dflash_cache.target.load import Target
from dflash_cache.target.pipeline import Job, JobPipeline, JobStates, pad_ids

SIZE = 3 * 20 * 3 * 32


def draw_jobs(count: int) -> list[Job]:
    generator = np.random.default_rng(0)
    jobs = []
    for number in range(count):
        ids = [generator.integers(4, 128, int(length), dtype=np.int32) for length in generator.integers(1, 21, 3)]
        jobs.append(Job(number, 0, np.arange(3) + 3 * number, ids))
    return jobs


@pytest.mark.parametrize("num_buffers", [1, 2, 5])
def test_every_job_is_written_once_in_order_with_the_states_of_its_own_forward(llama: Target, num_buffers: int) -> None:
    jobs, written = draw_jobs(7), []
    buffers = set()

    def write(states: JobStates) -> None:
        time.sleep(0.01)  # the forwards run ahead, and reuse buffers
        buffers.add(states.states_STLH.data_ptr())
        written.append((states.job, [states.sample_states(place).clone() for place in range(3)]))

    with JobPipeline(llama, write, num_buffers, SIZE) as pipeline:
        for job in jobs:
            pipeline.forward(job)
    assert [job.number for job, _ in written] == list(range(7))
    assert len(buffers) <= num_buffers
    for job, found in written:
        expected = capture_states(llama, *pad_ids(job.ids))
        for place, ids in enumerate(job.ids):
            assert torch.equal(found[place], expected[place, : len(ids)])


def test_a_forward_waits_while_all_buffers_are_full(llama: Target) -> None:
    release, done = threading.Event(), []

    def write(states: JobStates) -> None:
        release.wait(30)

    def forward_all(pipeline: JobPipeline) -> None:
        for job in draw_jobs(4):
            pipeline.forward(job)
            done.append(job.number)

    with JobPipeline(llama, write, 2, SIZE) as pipeline:
        thread = threading.Thread(target=forward_all, args=(pipeline,))
        thread.start()
        while len(done) < 2:
            time.sleep(0.01)
        time.sleep(0.2)
        assert done == [0, 1]
        release.set()
        thread.join()
    assert done == [0, 1, 2, 3]


@pytest.mark.parametrize("num_jobs", [2, 9])
def test_what_the_writing_thread_raises_is_raised_where_the_forwards_are(llama: Target, num_jobs: int) -> None:
    written = []

    def write(states: JobStates) -> None:
        if states.job.number == 1:
            raise RuntimeError("the disk fell over")
        written.append(states.job.number)

    def forward_all() -> None:
        with JobPipeline(llama, write, 1, SIZE) as pipeline:
            for job in draw_jobs(num_jobs):
                pipeline.forward(job)

    with pytest.raises(RuntimeError, match="the disk fell over"):
        forward_all()
    assert written == [0]
