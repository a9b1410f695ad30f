"""What never enters a corpus: authorization headers, cookies, keys."""

from __future__ import annotations

from typing import Any

SECRET = frozenset(
    (
        "authorization",
        "proxy-authorization",
        "cookie",
        "cookies",
        "set-cookie",
        "headers",
        "extra-headers",
        "api-key",
        "x-api-key",
        "x-auth-token",
        "access-token",
        "openai-organization",
        "openai-project",
    )
)
# What the client said and the tools it offered are the work itself and stay byte for byte.
VERBATIM = ("messages", "tools")


def without_secrets(value: Any) -> Any:
    """A copy without secret keys, at any depth outside messages and tools."""
    if isinstance(value, dict):
        return {
            key: inner if key in VERBATIM else without_secrets(inner)
            for key, inner in value.items()
            if str(key).lower().replace("_", "-") not in SECRET
        }
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    return value
