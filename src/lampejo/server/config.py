"""How the server listens and what it allows."""

import ipaddress
import re
from dataclasses import dataclass, field

from lampejo.errors import UserError
from lampejo.sampling import check_number

_ORIGIN = re.compile(r"https?://[^/\s?#@]+")


@dataclass(frozen=True)
class Security:
    """api_keys: any of them opens the API, none at all leaves it open; cors: origins whose web pages may call it, "*"
    for every page; insecure: no key is needed, from wherever the call comes."""

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors: tuple[str, ...] = ()
    insecure: bool = False

    def __post_init__(self) -> None:
        for key in self.api_keys:  # which no message may show
            if not key or not all("!" <= char <= "~" for char in key):
                raise UserError(
                    "An API key is empty or has other characters than a header can carry.",
                    "Use letters, digits and signs of ASCII, without spaces.",
                )
        for origin in self.cors:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise UserError(
                    f"--cors is {origin!r}, which is no origin of a web page.",
                    "Give scheme, host and port alone, such as https://chat.example.org:8443, or * for every page.",
                )


def is_loopback(host: str) -> bool:
    """Whether an address, without a look into DNS, can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class ServerConfig:
    """host and port to listen on; names: what the model is called beside its own name; max_queue: requests that may
    wait beside those that run; a call with more, each prompt and answer counted, is told to come back (429), unless it
    is alone; timeout_s: of a request, from its arrival; grace_s:
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
    security: Security = Security()

    def __post_init__(self) -> None:
        check_number("--port", self.port, 0, 65535, whole=True)
        check_number("--max-queue", self.max_queue, 0, 2**31, whole=True)
        check_number("--timeout", self.timeout_s, 0, 2**31, above=True)
        check_number("--grace", self.grace_s, 0, 2**31)
        if not (is_loopback(self.host) or self.security.api_keys or self.security.insecure):
            raise UserError(
                f"{self.host} can be reached from other machines, and no API key is set: anyone there could use the"
                " model.",
                "Give --api-key-file FILE (or LAMPEJO_API_KEY), leave --host out, or say --insecure if you mean it.",
            )
