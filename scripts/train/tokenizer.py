"""The byte-level BPE tokenizer: 4096 entries, Qwen-style split, specials and tool marks included.

    python scripts/train/tokenizer.py            # corpus shards -> lumotree/embedded/tokenizer.json

The split differs from Qwen's in two places: runs of digits are cut at two, and a newline keeps the
indentation that follows it, so that one token starts a line of Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

sys.path.insert(0, str(Path(__file__).parent))
from data import WORK, read_shard  # noqa: E402

VOCABULARY = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+"
    r"|\s*[\r\n]+[ \t]*|\s+(?!\S)|\s+"
)
TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def untrained() -> Tokenizer:
    """An empty tokenizer with the normaliser, split and decoder of the family."""
    tok = Tokenizer(models.BPE(byte_fallback=False))
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    return tok


def sample(shards: list[Path], every: int) -> Iterator[str]:
    """Every n-th file of each shard; prose counts as often as code."""
    for shard in shards:
        for i, row in enumerate(read_shard(shard)):
            if i % every == 0:
                yield row["text"]


def train(texts: Iterator[str]) -> Tokenizer:
    """Learn the merges, then append the specials and marks so that the total is VOCABULARY."""
    tok = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tok.add_tokens([AddedToken(s, special=False, normalized=False) for s in MARKS])
    if tok.get_vocab_size() != VOCABULARY:
        raise ValueError(f"{tok.get_vocab_size()} entries instead of {VOCABULARY}: give more text")
    return tok


def save(tok: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer.json (compact), tokenizer_config.json and the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(
        json.dumps(json.loads(tok.to_str()), ensure_ascii=False, separators=(",", ":"))
    )
    decoder = {
        str(tok.token_to_id(s)): {
            "content": s,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": s in SPECIAL,
        }
        for s in (*SPECIAL, *MARKS)
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE.read_text())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, default=WORK / "corpus")
    parser.add_argument("--out", type=Path, default=WORK.parent / "lumotree/embedded")
    parser.add_argument("--every", type=int, default=4, help="train on every n-th file")
    parser.add_argument("--context", type=int, default=16384)
    args = parser.parse_args()
    tok = train(sample(sorted(args.corpus.glob("train-*.xz")), args.every))
    save(tok, args.out, args.context)
    texts = [r["text"] for r in read_shard(args.corpus / "held-out.jsonl.xz")[:300]]
    tokens = sum(len(e.ids) for e in tok.encode_batch(texts))
    print(
        f"{sum(len(t.encode()) for t in texts) / tokens:.3f} bytes per token held out",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
