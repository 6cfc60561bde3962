"""How the server listens and what it allows."""

from dataclasses import dataclass

from lampejo.sampling import check_number


@dataclass(frozen=True)
class ServerConfig:
    """host and port to listen on; names: what the model is called beside its own name; max_queue: requests that may
    wait beside those that run, more are told to come back (429); timeout_s: of a request, from its arrival; grace_s:
    how long running requests may go on after SIGTERM; keep_alive_s: a silent stream gets a comment this often;
    max_body_bytes: of a request, beyond it 413; vllm_metrics: /metrics tells everything under vLLM's names too."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    max_queue: int = 128
    timeout_s: float = 3600.0
    grace_s: float = 30.0
    keep_alive_s: float = 15.0
    max_body_bytes: int = 16_000_000
    vllm_metrics: bool = False

    def __post_init__(self) -> None:
        check_number("--port", self.port, 0, 65535, whole=True)
        check_number("--max-queue", self.max_queue, 0, 2**31, whole=True)
        check_number("--timeout", self.timeout_s, 0, 2**31, above=True)
        check_number("--grace", self.grace_s, 0, 2**31)
