"""Templates of the pages, and writing a page whole or not at all."""

from __future__ import annotations

import os
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from lumotree.errors import CorpusError


def render_page(template: str, **values: Any) -> str:
    """A page that needs nothing outside itself; what comes from a run is escaped."""
    return _environment().get_template(template).render(css=asset("report.css"), **values)


def write_page(target: Path, text: str) -> Path:
    """Replaces a page. Raises CorpusError when it cannot be written."""
    draft = target.with_name(f".{target.name}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, target)
    except OSError as error:
        raise CorpusError(f"{target} cannot be written: {error.strerror}") from None
    return target


def asset(name: str) -> str:
    """A file beside this one as text."""
    return resources.files("replay.report").joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(asset),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = breakable
    return environment


def breakable(text: str) -> Any:
    """Arm specs may break after the signs of their grammar, and nowhere else."""
    from markupsafe import Markup, escape

    broken = str(escape(text))
    for sign in ":,=":
        broken = broken.replace(sign, f"{sign}<wbr>")
    return Markup(broken)
