"""Misspells one word of a Terraform tree, by seed.

The words are those that a machine can know: types of blocks, names of arguments, types of
resources, and every word of a reference (`module.network.endpoint_subnet_id`), functions included.
Text inside strings, keys of free maps (tags) and names that the author chooses are not misspelt.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.infra import terraform_files as files
from tests.infra.terraform_files import Block, Body, Files

LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, order=True)
class Word:
    """`kind`: block, argument or reference. It stands at position `at` of a file."""

    kind: str
    file: str
    at: int
    text: str
    line: int


def words(tree: Files) -> list[Word]:
    """Every word that may be misspelt, in a fixed order."""
    found = set()
    for file, text in tree.texts.items():
        for kind, at, word in _body(files.parse(text), top=True):
            assert text[at : at + len(word)] == word, (file, at, word, text[at : at + len(word)])
            found.add(Word(kind, file, at, word, text.count("\n", 0, at) + 1))
    return sorted(found)


def _body(body: Body, top: bool = False, free: bool = False) -> Iterator[tuple[str, int, str]]:
    for argument in body.arguments:
        if not free:
            yield "argument", argument.at, argument.name
        yield from _references(argument.value, argument.name)
    for block in body.blocks:
        yield "block", block.at, block.type
        yield from _labels(block, top)
        # Names of locals and of providers are the author's; what they hold is not.
        named = block.type in ("locals", "required_providers")
        yield from _body(block.body, free=named)


def _labels(block: Block, top: bool) -> Iterator[tuple[str, int, str]]:
    if (top and block.type in ("resource", "data")) or block.type == "dynamic":
        yield "block", block.labels_at[0], block.labels[0]


def _references(node: object, argument: str) -> Iterator[tuple[str, int, str]]:
    for one in files.walk(node):
        if isinstance(one, (files.Name, files.Get, files.Call)):
            yield "reference", one.at, one.word
    if argument in ("providers", "settings"):
        yield from _keys(node)


def _keys(node: object, inside: str = "") -> Iterator[tuple[str, int, str]]:
    """Keys that an object type knows. Those of `pools` are names that the author chooses."""
    if isinstance(node, files.Object):
        for key, value, _, at in node.items:
            if isinstance(key, files.Literal):
                if inside != "pools":
                    yield "argument", at, str(key.value)
                yield from _keys(value, str(key.value))


def misspelt(word: str, chance: random.Random, known: set[str]) -> str:
    """`word` with one letter lost, doubled, changed or swapped: none of the `known` words."""
    while True:
        place = chance.randrange(len(word))
        how = chance.choice(("lose", "double", "change", "swap"))
        letter = word[place]
        if how == "lose":
            made = word[:place] + word[place + 1 :]
        elif how == "double":
            made = word[:place] + letter + word[place:]
        elif how == "change":
            made = word[:place] + chance.choice(LETTERS) + word[place + 1 :]
        else:
            made = word[:place] + word[place + 1 : place + 2] + letter + word[place + 2 :]
        if made != word and made not in known and made[:1].isalpha() and "." not in made:
            return made


def with_misspelling(tree: Files, word: Word, made: str) -> Files:
    text = tree.texts[word.file]
    return tree.having(word.file, text[: word.at] + made + text[word.at + len(word.text) :])
