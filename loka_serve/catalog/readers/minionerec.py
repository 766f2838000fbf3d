"""Reader of MiniOneRec catalogs: ``index.json`` (item -> SID tokens) and ``info.txt`` (SID, title, item) beside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from loka_serve.catalog.readers.base import Source, read_json_object, read_lines
from loka_serve.catalog.table import ItemTable, ItemTableBuilder
from loka_serve.errors import CatalogError

INDEX_NAME = "index.json"
INFO_NAME = "info.txt"
LEVEL_LETTERS = "abcde"
_TOKEN = re.compile(r"<([a-z])_([0-9]+)>")
_INDEX_HEAD = re.compile(rb'\s*\{\s*"[^"]*"\s*:\s*\[\s*"<[a-z]_')


class MiniOneRecReader:
    """Items are the keys of the index, for example ``"17": ["<a_210>", "<b_231>", "<c_0>"]``.

    Titles become the attribute ``title``. ``info.txt`` may be absent (then there are no titles); where it is there, it
    must agree with the index.
    """

    name = "MiniOneRec index.json and info.txt"

    def matches(self, source: Source) -> bool:
        """A directory, or a JSON object whose first value is a list of SID tokens."""
        return source.path.is_dir() or source.path.name == INDEX_NAME or bool(_INDEX_HEAD.match(source.head))

    def read(self, path: Path, codebook_sizes: Sequence[int] | None, levels: int | None) -> ItemTable:
        """See :class:`CatalogReader`; places are items."""
        index_path = path / INDEX_NAME if path.is_dir() else path
        if not index_path.is_file():
            raise CatalogError(f"{path}: expected {INDEX_NAME} in this directory")
        builder = ItemTableBuilder(index_path, "item", levels, codebook_sizes)
        index = read_json_object(index_path)
        info_path = index_path.with_name(INFO_NAME)
        titles = _read_titles(info_path, index) if info_path.is_file() else {}
        for item_id, tokens in index.items():
            try:
                codes = _parse_tokens(tokens)
            except ValueError as error:
                builder.fail(item_id, f"semantic_id: {error}")
            attributes = {"title": titles[item_id]} if item_id in titles else None
            builder.add(item_id, item_id, codes, attributes=attributes)
        return builder.finish()


def _parse_tokens(tokens: object) -> list[int]:
    """``["<a_12>", "<b_3>"]`` -> [12, 3]; the letter must be that of the level."""
    if not isinstance(tokens, list):
        raise ValueError(f'expected a list of tokens like "<a_12>", got {tokens!r}')
    codes = []
    for level, token in enumerate(tokens):
        match = _TOKEN.fullmatch(token) if isinstance(token, str) else None
        if match is None:
            raise ValueError(f'expected a token like "<a_12>" for level {level}, got {token!r}')
        if level >= len(LEVEL_LETTERS) or match[1] != LEVEL_LETTERS[level]:
            raise ValueError(f"expected the letters {', '.join(LEVEL_LETTERS)} in level order, got {''.join(tokens)}")
        codes.append(int(match[2]))
    return codes


def _read_titles(path: Path, index: dict[str, object]) -> dict[str, str]:
    """item -> title, from lines ``SID <tab> title <tab> item`` without a header."""
    titles: dict[str, str] = {}
    for number, line in read_lines(path):
        semantic_id, first_tab, rest = line.partition("\t")
        title, last_tab, item_id = rest.rpartition("\t")  # a title may hold tabs itself
        if not first_tab or not last_tab:
            raise CatalogError(f"{path}, line {number}: expected SID, title and item between tabs, got {line[:80]!r}")
        if item_id in titles:
            raise CatalogError(f'{path}, line {number}: item: expected distinct items, "{item_id}" is there twice')
        tokens = index.get(item_id)
        if tokens is None:
            raise CatalogError(f'{path}, line {number}: item: expected an item of {INDEX_NAME}, got "{item_id}"')
        if isinstance(tokens, list) and "".join(map(str, tokens)) != semantic_id:
            expected = "".join(map(str, tokens))
            raise CatalogError(f"{path}, line {number}: SID: {INDEX_NAME} has {expected} for it, got {semantic_id}")
        titles[item_id] = title
    return titles
