"""Text in, text out: chat templates, encoding, and decoding one token at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lumotree.errors import CheckpointError, RequestError

Message = dict[str, Any]


class ChatTokenizer:
    """The tokenizer and chat template of a checkpoint folder; byte-level BPE only.

    eos_ids: the ids that end a text, from generation_config.json and the tokenizer.
    vocab_size: number of token ids the tokenizer knows, added ones included.
    """

    def __init__(self, tokenizer: Any, folder: Path, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._folder = folder
        self.eos_ids = eos_ids
        self.vocab_size = len(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._bytes = {i: b"" if t.special else _bytes_of(t.content) for i, t in added.items()}

    @classmethod
    def load(cls, folder: str | Path) -> ChatTokenizer:
        """Raises CheckpointError naming the folder and file when something is missing or broken."""
        folder = Path(folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(f"{folder}: no tokenizer.json", "name a checkpoint folder")
        # Imported here: transformers takes seconds to load, which --help should not.
        from tokenizers.decoders import ByteLevel
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # transformers raises whatever its parsers raise
            reason = str(error).strip().split("\n")[0]
            raise CheckpointError(f"{file}: cannot load the tokenizer: {reason}") from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(getattr(backend, "decoder", None), ByteLevel):
            raise CheckpointError(f"{file}: not a byte-level BPE tokenizer")
        eos_ids = _generation_eos(folder / "generation_config.json")
        if tokenizer.eos_token_id is not None:
            eos_ids |= {tokenizer.eos_token_id}
        return cls(tokenizer, folder, eos_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; nothing is added around it."""
        # Quiet: the length limit is the decoder's to check.
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, invalid UTF-8 as U+FFFD."""
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to the text; none for special and unknown ids."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
            found = self._bytes[token_id] = _bytes_of(token)
        return found

    def encode_chat(
        self, messages: Sequence[Message], tools: Sequence[Message] | None = None
    ) -> list[int]:
        """Token ids of a conversation with the generation prompt after it.

        messages: OpenAI chat format; content may be a string, a list of text parts or null.
        Tool-call arguments reach the template as objects when they parse as such, else as the
        recorded string. Raises RequestError, naming the message where it is known.
        """
        if not messages:
            raise RequestError("the conversation has no messages")
        if self._tokenizer.chat_template is None:
            raise CheckpointError(f"{self._folder}: the tokenizer has no chat template")
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        try:
            text = self._render(plain, tools)
        except Exception as error:  # templates raise whatever their authors chose
            # Many templates iterate over the arguments and cannot take a string.
            wrapped = [_wrap_arguments(message) for message in plain]
            if wrapped == plain:
                raise self._template_error(plain, tools, error) from error
            try:
                text = self._render(wrapped, tools)
            except Exception as second:
                raise self._template_error(wrapped, tools, second) from second
        return self.encode(text)

    def _render(self, messages: list[Message], tools: Sequence[Message] | None) -> str:
        return self._tokenizer.apply_chat_template(
            messages,
            tools=list(tools) if tools else None,
            add_generation_prompt=True,
            tokenize=False,
        )

    def _template_error(
        self, messages: list[Message], tools: Sequence[Message] | None, error: Exception
    ) -> RequestError:
        """Blames the message after the longest prefix that renders."""
        place = "the conversation"
        for count in range(len(messages) - 1, 0, -1):
            try:
                self._render(messages[:count], tools)
            except Exception:
                continue
            place = f"message {count} (role {messages[count]['role']!r})"
            break
        return RequestError(f"the chat template refuses {place}: {error}")


class StreamDecoder:
    """Turns tokens into text piece by piece; the pieces joined are the full decode, up to the
    first stop string.

    A stop string counts when its last character arrives; of those ending together the longest
    wins. It and everything after it are left out. Text that may still become a stop string, and
    the bytes of an unfinished character, wait for the next token or for `finish`.
    """

    def __init__(self, tokenizer: ChatTokenizer, stop: Iterable[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Takes one token; returns the text that is now certain, possibly none."""
        if self.stopped:
            return ""
        return self._take(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """The text still held back. No push may follow."""
        if self.stopped:
            return ""
        text = self._take(self._utf8.decode(b"", final=True))
        held, self._held = self._held, ""
        return text + held

    def _take(self, new: str) -> str:
        text = self._held + new
        cut = self._first_stop(text)
        if cut is not None:
            self.stopped, self._held = True, ""
            return text[:cut]
        keep = len(text) - self._possible_stop(text)
        self._held = text[keep:]
        return text[:keep]

    def _first_stop(self, text: str) -> int | None:
        """Where the stop string that ends first begins."""
        found = [(at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0]
        return min(found)[1] if found else None

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if any(s.startswith(text[-size:]) for s in self._stop):
                return size
        return 0


def _generation_eos(file: Path) -> frozenset[int]:
    """eos_token_id of generation_config.json: absent, an id, or a list of ids."""
    if not file.is_file():
        return frozenset()
    try:
        eos = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        return frozenset([] if eos is None else [eos] if isinstance(eos, int) else map(int, eos))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot read eos_token_id: {error}") from error


def _plain_message(index: int, message: Message) -> Message:
    """The message as templates expect it: content a string, arguments parsed."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"message {index} is not an object with a role")
    plain = {**message, "content": _plain_content(index, message.get("content"))}
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise RequestError(f"message {index}: tool_calls is not a list of objects")
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_content(index: int, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if all(isinstance(part, str) for part in parts):
            return "".join(parts)
    raise RequestError(f"message {index}: content is neither text nor a list of text parts")


def _plain_call(call: Message) -> Message:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _wrap_arguments(message: Message) -> Message:
    """Arguments that did not parse, as an object with one field that holds the string."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            wrapped = {"arguments": function["arguments"]}
            call = {**call, "function": {**function, "arguments": wrapped}}
        calls.append(call)
    return {**message, "tool_calls": calls} if calls else message


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others follow at 256."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _bytes_of(token: str) -> bytes:
    """As the byte-level decoder has it: a token outside the alphabet stands for its own UTF-8."""
    try:
        return bytes(_BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode()
