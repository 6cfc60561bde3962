"""/metrics: every number is the sum of what the requests themselves tell, under both names."""

import asyncio
import contextlib
import math
import threading
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from lampejo.api import LLM
from lampejo.server.config import ServerConfig
from lampejo.server.counts import BOUNDS, Histogram
from lampejo.server.errors import ApiError
from lampejo.server.metrics import routes
from lampejo.server.service import Answers, Job, Service
from lampejo.speculate import NgramDrafter
from scripted import ids_of, random_target, scripted_llm

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scraped:
    """What a scrape says, with every name and label checked to be well-formed by the official parser."""

    def __init__(self, text: str) -> None:
        self.samples: Samples = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("process_"):
                    continue
                assert sample.labels.pop("model_name") == "tiny"
                key = sample.name, tuple(sorted(sample.labels.items()))
                assert key not in self.samples, "told twice"
                self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted(labels.items()))]

    def by(self, name: str, label: str) -> dict[str, float]:
        return {labels[0][1]: v for (n, labels), v in self.samples.items() if n == name and labels[0][0] == label}


async def scrape(service: Service) -> Scraped:
    app = FastAPI()
    app.include_router(routes(service, "tiny"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        response = await client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    return Scraped(response.text)


def repetitive(seed: int = 0) -> Any:
    """A target that follows its text's beginning, so that n-gram drafts are often right, and sometimes not."""
    random = random_target(seed)

    def target(text: Sequence[int]) -> Any:
        return random(text) if len(text) % 11 == 0 else text[len(text) % 5 + 1]

    return target


@contextlib.contextmanager
def served(vllm_metrics: bool = False, timeout_s: float = 60.0, **config: Any) -> Any:
    with scripted_llm(repetitive(), [NgramDrafter(3)], **{"width": 6, "max_rows": 3, "page_size": 8, **config}) as llm:
        yield Service(llm, ServerConfig(vllm_metrics=vllm_metrics, timeout_s=timeout_s))


def job_of(prompt: str, max_tokens: int = 40, n: int = 1) -> Job:
    return Job([ids_of(prompt)], {"max_tokens": max_tokens, "ignore_eos": True}, n)


async def read(answers: Answers, num_pieces: int | None = None) -> Answers:
    """All pieces, or the first few and then gone."""
    iterator = aiter(answers)
    with contextlib.suppress(StopAsyncIteration):
        while num_pieces is None or num_pieces > 0:
            await anext(iterator)
            num_pieces = None if num_pieces is None else num_pieces - 1
    await iterator.aclose()
    answers.close()
    return answers


async def until_idle(llm: LLM) -> None:
    """Until the engine's thread has seen the aborts."""
    async with asyncio.timeout(30):
        while llm.engine.has_work:
            await asyncio.sleep(0.01)


async def test_the_totals_are_the_sums_over_the_requests():
    """A dashboard that disagrees with the responses' own statistics is of no use."""
    prompts = ["abcdefgh" * 4, "abcdefgh" * 4 + "xyz", "some other text", "hello hello hello"]
    with served() as service:
        jobs = zip(prompts * 2, (40, 1, 17, 60, 33, 2, 40, 5), (1, 2, 1, 3, 1, 1, 1, 1), strict=True)
        started = [await service.start(job_of(*numbers)) for numbers in jobs]
        done = await asyncio.gather(*map(read, started))
        told = await scrape(service)
        requests = [request for answers in done for request in answers.requests]
        usages = [answers.usage for answers in done]
        stats = [answers.metrics["speculative_decoding"] for answers in done]
        num_drafts = sum(s["num_spec_steps"] for s in stats)
        assert num_drafts > 10
        assert told("lampejo:spec_decode_num_drafts_total") == num_drafts
        assert told("lampejo:spec_decode_num_draft_tokens_total") == sum(s["num_draft_tokens"] for s in stats)
        num_accepted = sum(s["num_accepted_draft_tokens"] for s in stats)
        assert told("lampejo:spec_decode_num_accepted_tokens_total") == num_accepted > 0
        by_position = told.by("lampejo:spec_decode_num_accepted_tokens_per_pos_total", "position")
        assert sum(by_position.values()) == num_accepted
        for k in range(15):
            expected = sum(sum(s["acceptance_histogram"][k + 1 :]) for s in stats)
            assert by_position[str(k)] == expected
        num_committed = told("lampejo:spec_decode_num_committed_tokens_total")
        assert num_committed == pytest.approx(
            sum(s["mean_acceptance_length"] * s["num_spec_steps"] for s in stats if s["num_spec_steps"])
        )
        num_generated = sum(usage["completion_tokens"] for usage in usages)
        assert told("lampejo:generation_tokens_total") == num_generated
        assert told("lampejo:prompt_tokens_total") == sum(request.num_prompt for request in requests)
        assert told("lampejo:prefix_cache_queries_total") == sum(request.num_prompt for request in requests)
        assert told("lampejo:prefix_cache_hits_total") == sum(request.num_cached for request in requests) > 0
        assert told.by("lampejo:request_success_total", "finished_reason") == {
            "stop": 0,
            "length": 11,
            "abort": 0,
            "error": 0,
        }
        assert told("lampejo:time_to_first_token_seconds_count") == 11
        assert told("lampejo:e2e_request_latency_seconds_count") == 11
        assert told("lampejo:request_time_per_output_token_seconds_count") == 9, "two answers have one token"
        assert (told("lampejo:num_requests_running"), told("lampejo:num_requests_waiting")) == (0, 0)
        assert told("lampejo:kv_cache_usage_perc") == 0


async def test_aborts_and_timeouts_are_counted_as_such_and_the_totals_stay_exact():
    """What a reader left unread was drafted all the same, and is in the totals."""
    with served() as service:
        answers = [
            await read(await service.start(job_of("abcabcabcabc", 400)), num_pieces) for num_pieces in (3, 0, 1, None)
        ]
        await until_idle(service.llm)
        told = await scrape(service)
        endings = told.by("lampejo:request_success_total", "finished_reason")
        assert endings == {"stop": 0, "length": 1, "abort": 3, "error": 0}
        assert [answer.endings for answer in answers] == [["abort"], ["abort"], ["abort"], ["length"]]
        assert told("lampejo:generation_tokens_total") == sum(a.usage["completion_tokens"] for a in answers)
        requests = [request for answer in answers for request in answer.requests]
        for name, field in (
            ("num_drafts", "num_spec_steps"),
            ("num_draft_tokens", "num_draft_tokens"),
            ("num_accepted_tokens", "num_accepted_draft_tokens"),
            ("num_committed_tokens", "num_committed_tokens"),
        ):
            total = sum(getattr(request.stats, field) for request in requests)
            assert told(f"lampejo:spec_decode_{name}_total") == total > 0
        assert told("lampejo:spec_decode_num_inexact_tokens_total") == 0
        assert told("lampejo:e2e_request_latency_seconds_count") == 1
        assert (told("lampejo:num_requests_running"), told("lampejo:num_requests_waiting")) == (0, 0)


async def test_an_answer_cut_by_its_deadline_counts_as_aborted(monkeypatch):
    """O1: an operator must see that the server did not finish it, though its reader gets what there is."""
    with served(timeout_s=0.2) as service:
        hold = threading.Event()
        verify = service.llm.engine.runner.verify
        monkeypatch.setattr(
            service.llm.engine.runner, "verify", lambda b: (len(b.ids) < 12 and hold.wait(30), verify(b))[1]
        )
        pieces = [piece async for piece in await service.start(job_of("abcabcabcabc", 400))]
        hold.set()
        assert pieces[-1].timed_out
        told = await scrape(service)
        assert told.by("lampejo:request_success_total", "finished_reason")["abort"] == 1


async def test_a_failed_engine_is_counted_as_an_error(monkeypatch):
    """O2: requests that the engine took down with it are neither finished nor aborted."""
    with served() as service:
        monkeypatch.setattr(service.llm.engine.runner, "verify", lambda batch: 1 / 0)
        answers = await service.start(job_of("abcabcabcabc", 40, n=2))
        with pytest.raises(ApiError, match="engine has failed"):
            await read(answers)
        told = await scrape(service)
        assert told.by("lampejo:request_success_total", "finished_reason")["error"] == 2
        assert answers.endings == ["error", "error"]


async def test_running_and_waiting_requests_and_pages_are_told_as_they_are(monkeypatch):
    """Gauges are read at the moment of the scrape."""
    with served(max_rows=3, num_pages=64) as service:
        hold, at_work = threading.Event(), threading.Event()
        verify = service.llm.engine.runner.verify

        def held(batch: Any) -> Any:
            if len(batch.rows) == 3:
                at_work.set()
                hold.wait(30)
            return verify(batch)

        monkeypatch.setattr(service.llm.engine.runner, "verify", held)
        started = [await service.start(job_of(letter * 32, 9)) for letter in "abcde"]
        assert await asyncio.to_thread(at_work.wait, 30)
        told = await scrape(service)
        hold.set()
        assert (told("lampejo:num_requests_running"), told("lampejo:num_requests_waiting")) == (3, 2)
        assert 12 / 64 <= told("lampejo:kv_cache_usage_perc") <= 18 / 64, "3 requests of 32 tokens, pages of 8"
        await asyncio.gather(*map(read, started))


VLLM_NAMES = {
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
}


async def test_the_names_of_vllm_are_told_on_request_with_the_same_values():
    """A dashboard made for vLLM works unchanged."""
    with served(vllm_metrics=True) as service:
        await read(await service.start(job_of("abcabcabcabc", 60)))
        told = (await scrape(service)).samples
    plain = {name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum") for name, _ in told}
    assert {name.removeprefix("vllm:") for name in plain if name.startswith("vllm:")} == VLLM_NAMES
    for (name, labels), value in told.items():
        if name.startswith("vllm:"):
            assert told[name.replace("vllm:", "lampejo:"), labels] == value


async def test_without_being_asked_no_other_engine_is_impersonated():
    """A scrape of several engines would count twice."""
    with served() as service:
        told = (await scrape(service)).samples
    assert {name.partition(":")[0] for name, _ in told} == {"lampejo"}
    assert told["lampejo:spec_decode_num_accepted_tokens_per_pos_total", (("position", "14"),)] == 0, (
        "a rate misses the first step of a series that was not there at 0"
    )


def test_a_duration_falls_into_the_bucket_that_its_end_names():
    """Fault: buckets off by one, so that every percentile is wrong."""
    histogram = Histogram()
    for seconds in (0.0, 0.001, 0.0011, 0.03, 1000.0, 1000.1, 5000.0):
        histogram.observe(seconds)
    filled = {end: n for end, n in zip((*BOUNDS, math.inf), histogram.counts, strict=True) if n}
    assert filled == {0.001: 2, 0.0015: 1, 0.03: 1, 1000.0: 1, math.inf: 2}
    assert list(BOUNDS) == sorted(set(BOUNDS))


async def test_two_apps_in_one_process_do_not_share_numbers():
    """Fault: the global registry, in which a second server finds its names taken."""
    with served() as first, served() as second:
        await read(await first.start(job_of("abcabcabcabc", 9)))
        assert (await scrape(first))("lampejo:generation_tokens_total") == 9
        assert (await scrape(second))("lampejo:generation_tokens_total") == 0


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
        "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;"
        "escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    ],
    ids=["Prometheus 2", "Prometheus 3"],
)
async def test_prometheus_itself_gets_the_names_with_their_colons(accept):
    """Fault: asked for newer formats, as Prometheus does, the library turns vllm: into vllm_."""
    with served(vllm_metrics=True) as service:
        await read(await service.start(job_of("abcabcabcabc", 60)))
        app = FastAPI()
        app.include_router(routes(service, 'a "tiny" model\\'))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            response = await client.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    (sample,) = families["vllm:generation_tokens"].samples
    assert (sample.name, sample.value) == ("vllm:generation_tokens_total", 60)
    assert sample.labels == {"model_name": 'a "tiny" model\\'}
