"""What never enters a corpus or an export: values whose key names headers, cookies or credentials.

Keys alone are looked at, without regard to case and punctuation: `X-Goog-Api-Key`, `openai_api_key`
and `apiKey` all end in `apikey`. A secret within a text or an address is not found.
"""

from __future__ import annotations

import re
from typing import Any

SUFFIXES = (
    "headers",
    "authorization",
    "cookie",
    "cookies",
    "apikey",
    "token",
    "secret",
    "password",
    "accesskey",
    "secretkey",
    "privatekey",
    "credentials",
)
EXACT = frozenset(("openaiorganization", "openaiproject"))
# Tokens of a text: eos_token, price_per_token, ... Plurals such as max_tokens end otherwise.
TEXT_TOKEN = re.compile(
    r"(bos|eos|pad|unk|sep|cls|mask|stop|start|end|special|image|audio|video|think|max|min|first"
    r"|last|next|prompt|completion|input|output|.*per)token"
)
# What the client said and the functions it offered are the work itself and stay byte for byte.
VERBATIM = ("messages", "message", "function", "functions", "logprobs")
# In a JSON schema the keys below these are names of parameters, one of which may be `token`.
NAMED = ("properties", "$defs", "definitions")


def without_secrets(value: Any) -> Any:
    """A copy without secret keys, at any depth outside messages, functions and schema properties.

    A tool that is no function, such as an MCP server with headers, is filtered like the rest.
    """
    if isinstance(value, dict):
        return {
            key: inner if _stays(key, inner) else without_secrets(inner)
            for key, inner in value.items()
            if not is_secret(key, inner)
        }
    if isinstance(value, list):
        return [without_secrets(inner) for inner in value]
    return value


def is_secret(key: str, value: Any) -> bool:
    """True when a key says that its value is a header, a cookie or a credential."""
    name = re.sub(r"[^a-z0-9]", "", str(key).lower())
    if name.endswith("token") and (
        TEXT_TOKEN.fullmatch(name) or isinstance(value, (bool, int, float))
    ):
        return False
    return name in EXACT or name.endswith(SUFFIXES)


def _stays(key: str, value: Any) -> bool:
    if key in VERBATIM:
        return True
    if not isinstance(value, dict):
        return False
    if key in NAMED:
        return all(isinstance(inner, (dict, bool)) for inner in value.values())
    return key == "completion" and "role" in value
