"""/metrics: the server in numbers, in the text format of Prometheus.

The names are vLLM's behind the prefix ``lampejo:``; with ``--metrics-compat vllm`` those that vLLM has come under
``vllm:`` too, with the same meaning, so that its dashboards work. Nothing is kept here: all is read when asked for.
What the engine's thread owns is read without a lock, so only single integers and lengths are, and one short list of
integers that is copied at once.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.responses import Response

from lampejo.server.counts import BOUNDS, Histogram
from lampejo.server.service import Service

PREFIX, VLLM = "lampejo:", "vllm:"


class Metrics(Collector):
    """Reads one service."""

    def __init__(self, service: Service, model_name: str) -> None:
        self.service = service
        self.model_name = model_name

    def collect(self) -> Iterable[Metric]:
        yield from self._common(PREFIX)
        yield from self._own()
        if self.service.config.vllm_metrics:
            yield from self._common(VLLM)

    def _common(self, prefix: str) -> Iterable[Metric]:
        """What vLLM has too."""
        service, counts, engine = self.service, self.service.counts, self.service.llm.engine
        stats, scheduler = engine.stats, engine.scheduler
        gauges = {
            "num_requests_running": ("Requests that have a row of the batch.", service.num_running),
            "num_requests_waiting": ("Requests that were let in and have no row yet.", service.num_waiting),
            "kv_cache_usage_perc": ("Share of the pages in use, 0 to 1.", min(1.0, max(0.0, engine.pool.usage))),
        }
        counters = {
            "spec_decode_num_drafts": ("Steps of a request that verified drafts.", stats.num_spec_steps),
            "spec_decode_num_draft_tokens": ("Tokens drafted.", stats.num_draft_tokens),
            "spec_decode_num_accepted_tokens": ("Drafted tokens accepted.", stats.num_accepted_draft_tokens),
            "prefix_cache_queries": ("Prompt tokens looked for in the prefix cache.", scheduler.num_queried_tokens),
            "prefix_cache_hits": ("Prompt tokens found there.", scheduler.num_hit_tokens),
            "num_preemptions": ("Times that a request gave its pages back to wait.", scheduler.num_preemptions),
            "prompt_tokens": ("Prompt tokens of requests that got their first token.", counts.num_prompt_tokens),
            "generation_tokens": ("Tokens generated.", counts.num_generated_tokens),
        }
        histograms = {
            "time_to_first_token_seconds": ("From a request's arrival to its first token.", counts.first_token),
            "inter_token_latency_seconds": (
                "Between the steps that added tokens to a request; one step may add several.",
                counts.between_steps,
            ),
            "request_time_per_output_token_seconds": (
                "A finished request's mean time per token after the first.",
                counts.per_token,
            ),
            "e2e_request_latency_seconds": ("From arrival to the last token, of finished requests.", counts.whole),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(prefix + name, text, labels=["model_name"])
            gauge.add_metric([self.model_name], value)
            yield gauge
        for name, (text, total) in counters.items():
            yield self._counter(prefix + name, text, total)
        yield self._counters(
            prefix + "spec_decode_num_accepted_tokens_per_pos",
            "Steps in which the draft at this position (from 0) was accepted.",
            "position",
            self._accepted_by_position(),
        )
        yield self._counters(
            prefix + "request_success",
            'Requests that ended: with "stop" or "length" in their time, with "abort" when their reader went or their'
            ' time was over, with "error" when the engine failed, or their grammar grew too complex.',
            "finished_reason",
            counts.endings,
        )
        for name, (text, histogram) in histograms.items():
            yield self._histogram(prefix + name, text, histogram)

    def _own(self) -> Iterable[Metric]:
        stats = self.service.llm.engine.stats
        yield self._counter(
            PREFIX + "spec_decode_num_committed_tokens",
            "Tokens committed by steps with drafts; by spec_decode_num_drafts it is the acceptance length.",
            stats.num_committed_tokens,
        )
        yield self._counter(
            PREFIX + "spec_decode_num_inexact_tokens",
            "Accepted drafts that were not the target's own choice: 0 without --policy typical.",
            stats.num_inexact_tokens,
        )
        statuses = {str(status): total for status, total in sorted(self.service.counts.statuses.items())}
        yield self._counters(PREFIX + "http_responses", "Responses by HTTP status.", "status", statuses)

    def _accepted_by_position(self) -> Mapping[str, int]:
        """Position k counts the steps that accepted more than k drafts."""
        histogram = list(self.service.llm.engine.stats.acceptance_histogram)
        at_least = list(accumulate(reversed(histogram)))[::-1]
        speculator = self.service.llm.engine.speculator
        num_positions = speculator.controller.max_width if speculator.drafters else 0
        numbers = [*at_least[1:], *[0] * num_positions][: max(num_positions, len(at_least) - 1)]
        return {str(k): number for k, number in enumerate(numbers)}

    def _counter(self, name: str, text: str, total: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self.model_name], total)
        return family

    def _counters(self, name: str, text: str, label: str, totals: Mapping[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=["model_name", label])
        for value, total in totals.items():
            family.add_metric([self.model_name, value], total)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=["model_name"])
        ends = [*map(floatToGoString, BOUNDS), "+Inf"]
        family.add_metric([self.model_name], list(zip(ends, accumulate(histogram.counts), strict=True)), histogram.sum)
        return family


def routes(service: Service, model_name: str) -> APIRouter:
    registry = CollectorRegistry()
    registry.register(Metrics(service, model_name))
    ProcessCollector(registry=registry)
    router = APIRouter()

    @router.get("/metrics", tags=["server"])
    async def metrics() -> Response:
        """Metrics of Prometheus."""
        # In this one format whatever is asked for: in the others the library writes lampejo_ for lampejo:, and vllm_.
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return router
