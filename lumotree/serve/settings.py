"""What a server is told at start-up."""

from __future__ import annotations

from dataclasses import dataclass

from lumotree.errors import LumoTreeError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ServeSettings:
    """Limits and addresses. Bytes are bytes, times are seconds.

    active: requests decoded at once, each in a state slot of its own. queue: requests that may
    wait beside them; one more is refused. max_context: positions per slot, prompt and generated
    tokens together. request_timeout_s: from arrival to the last token. idle_timeout_s: longest
    pause of a client that sends its body or reads its answer. drain_timeout_s: how long a stop
    waits for requests under way. prefix_bytes: budget of the prefix store, 0 for none.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "lumotree"
    api_key: str | None = None
    active: int = 4
    queue: int = 32
    max_context: int | None = None
    max_body_bytes: int = 16 << 20
    prefix_bytes: int = 1 << 30
    request_timeout_s: float = 600.0
    idle_timeout_s: float = 60.0
    drain_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        """Raises LumoTreeError naming the option."""
        least = {
            "port": 0,
            "active": 1,
            "queue": 0,
            "max_context": 2,
            "max_body_bytes": 1,
            "prefix_bytes": 0,
        }
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                option = name.replace("_", "-")
                raise LumoTreeError(
                    f"--{option} is {value}; it takes a whole number from {minimum}"
                )
        for name in ("request_timeout_s", "idle_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            if not value > 0:
                option = name.removesuffix("_s").replace("_", "-")
                raise LumoTreeError(f"--{option} is {value:g}; it takes seconds above 0")
        if self.port > 65535:
            raise LumoTreeError(f"--port is {self.port}; it takes a number up to 65535")
        if self.api_key is not None and not self.api_key.strip():
            raise LumoTreeError("the API key is empty", "set the variable, or leave the option out")

    @property
    def loopback(self) -> bool:
        return self.host in LOOPBACK
