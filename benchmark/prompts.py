"""Prompts to benchmark on: a dozen of our own, WikiText-2, PG-19, or a file of the user's.

No silent fallback: a dataset that cannot be had is an error that names the others.

    texts = load_prompts("wikitext2", None)
    prompts = cut_prompts(texts, tokenizer, vocab_size, n_tokens=150, n_prompts=8)

Our own are short. Where a length is asked for that they have not, the target can write them on:

    prompts = lengthened(prompts, pair, n_tokens=800)
"""

import zipfile
import zlib
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from tokenizers import Tokenizer

from benchmark.pg19 import fetch_opening, list_books
from cli.errors import UsageError
from cli.metrics import token_ids
from cli.models import Pair, Request, encode
from cli.options import MAX_PROMPT_BYTES
from engine.checkpoint import CheckpointError
from engine.foreign import ForeignFile, Word, checked, parse_json, read_bytes, read_text
from engine.hub import hub_client
from engine.sampling import Sampling
from methods.static import Alone

DATASETS = ("builtin", "wikitext2", "pg19")
WIKITEXT_REPOSITORY = "ggml-org/ci"
WIKITEXT_ZIP = "wikitext-2-raw-v1.zip"
WIKITEXT_FILE = "wikitext-2-raw/wiki.test.raw"  # the embedded pair has seen the validation split
WIKITEXT_BYTES = 2**24  # at most, of the archive (4.7 million) and of the text (1.3 million)
INFLATED_BY_PARTS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # by others all that a part gives
BROKEN_ARCHIVE = (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, RuntimeError)
BROKEN_ARCHIVE += (ValueError, ForeignFile)
PROMPT = {"prompt": Word()}  # a line of a .jsonl file
MAX_BYTES = 2**24  # of a file of prompts, which the tokenizer reads in some 15 seconds
SHORTEST = 200  # characters of a paragraph; shorter ones say too little to go on from

BUILTIN = (
    # encyclopaedic
    "The common swift is a medium-sized bird that spends almost its whole life in the air. It "
    "feeds, drinks, mates and even sleeps on the wing, and comes to land only to nest. In the "
    "north of its range it arrives in the first days of May and leaves again before the end of "
    "August. The nest is built in a hole in a wall or under the tiles of a roof, and",
    "The Battle of the Three Rivers was fought in the autumn of 1643 between the army of the "
    "northern provinces and a smaller force that held the only bridge. The defenders had few "
    "guns and almost no cavalry, but the ground before them was soft after a week of rain. On "
    "the morning of the second day the northern general ordered",
    "Granite is a coarse rock made mostly of quartz, feldspar and mica. It forms when molten "
    "rock cools slowly, far below the surface, so that its crystals have time to grow. Because it "
    "is hard and resists the weather, it has been used for bridges, harbours and monuments. The "
    "colour of the stone depends on",
    # narrative
    "It was nearly dark when the old man came to the door of the inn and asked whether there was "
    "a bed to be had. He carried a small leather bag, which he would not let the boy take from "
    "him, and his boots were white with dust. The landlady looked at him for some time before "
    'she answered. "There is a room," she said at last, "but',
    "My sister had always been the braver of the two of us. When we were children it was she who "
    "climbed the wall of the orchard, and she who went first into the cellar with the candle. So "
    "I was not surprised, on the night of the storm, to find her already at the window with her "
    "coat on. She turned to me and",
    "The ship had been eleven days out of port when the wind failed. The sea lay round her like "
    "glass, and the sails hung straight down from the yards. The captain walked up and down the "
    "deck with his hands behind his back and spoke to nobody. On the third day of the calm, the "
    "mate came to him and said",
    # list-like
    "Things to buy before the journey: two blankets, a coil of rope, a lantern, a pound of "
    "candles, a box of matches, a knife, a tin kettle, three cups, a bag of flour, a bag of "
    "salt, dried apples, dried beans, coffee, sugar, soap, needles and thread, a map of the "
    "coast, a compass,",
    "Kings of the island and the years of their reigns:\n1. Aldric the Elder, 801 to 823\n2. "
    "Aldric the Younger, 823 to 830\n3. Osmund, 830 to 851\n4. Edwy the Tall, 851 to 862\n5. "
    "Osmund the Second, 862 to 880\n6. Hereward, 880 to 884\n7. Edwy the Second, 884 to",
    "Monday: clean the stove, bake the bread, mend the gate.\nTuesday: wash the linen, walk to "
    "the market, write to the lawyer.\nWednesday: bake the bread, weed the garden, pay the "
    "miller.\nThursday: clean the windows, feed the hens, read to grandmother.\nFriday: bake the "
    "bread,",
    # code-like
    "def count_words(text):\n    counts = {}\n    for line in text.split('\\n'):\n        for word "
    "in line.split(' '):\n            if word in counts:\n                counts[word] = "
    "counts[word] + 1\n            else:\n                counts[word] = 1\n    return counts\n\n"
    "def longest_word(text):\n    longest = ''\n    for line in text.split('\\n'):\n",
    '{"name": "harbour", "kind": "place", "size": 12, "open": true}\n{"name": "lighthouse", '
    '"kind": "place", "size": 3, "open": false}\n{"name": "market", "kind": "place", "size": 40, '
    '"open": true}\n{"name": "chapel", "kind": "place",',
    "CREATE TABLE books (id INTEGER, title TEXT, author TEXT, year INTEGER);\nINSERT INTO books "
    "VALUES (1, 'The Long Road', 'A. Miller', 1871);\nINSERT INTO books VALUES (2, 'The Short "
    "Road', 'A. Miller', 1874);\nINSERT INTO books VALUES (3, 'A Winter in the Hills', 'J. "
    "Carter',",
)


def load_prompts(dataset: str, file: str | None, n_books: int = 12) -> list[str]:
    """The texts of a dataset, or of a file if one is given.

    A .jsonl file has one {"prompt": ...} a line; any other file is plain text, of which paragraphs
    of at least 200 characters count. Lines end at a line feed and nowhere else. n_books: how many
    of PG-19's are fetched, evenly spread over the hundred, each a request. Raises UsageError.
    """
    if file is not None:
        return _read_file(Path(file))
    if dataset == "builtin":
        return list(BUILTIN)
    if dataset == "wikitext2":
        return paragraphs(_fetch_wikitext())
    if dataset == "pg19":
        return [fetch_opening(book) for book in spread(list_books(), n_books)]
    raise UsageError(f"unknown dataset {dataset!r}; there are {', '.join(DATASETS)}, or --prompts")


def _read_file(file: Path) -> list[str]:
    try:
        text = read_text(file, MAX_BYTES)
    except ForeignFile as error:
        raise UsageError(f"--prompts: {error}") from error
    if file.suffix.lower() == ".jsonl":
        texts = _prompt_fields(text, file)
        what = "line"
    else:
        texts = paragraphs(text)
        what = f"paragraph of {SHORTEST} characters or more"
    if not texts:
        raise UsageError(f"{file} has no {what} to use as a prompt")
    longest = max(len(text) for text in texts)
    if longest > MAX_PROMPT_BYTES:
        most = f"{MAX_PROMPT_BYTES // 1_000_000} MB"
        raise UsageError(f"{file} has a {what} longer than a prompt may be, {most}")
    return texts


def _prompt_fields(text: str, file: Path) -> list[str]:
    texts = []
    for n, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            texts.append(_prompt_field(line, f"{file}, line {n}"))
    return texts


def _prompt_field(line: str, where: str) -> str:
    try:
        prompt = checked(parse_json(line, where), PROMPT, where)["prompt"]
        prompt.encode("utf-8")
    except ForeignFile as error:
        raise UsageError(str(error)) from error
    except UnicodeEncodeError as error:
        raise UsageError(f'{where}: "prompt" has half a character: {error.reason}') from error
    if not prompt:
        raise UsageError(f'{where}: "prompt" is empty')
    return prompt


def paragraphs(text: str) -> list[str]:
    """Lines joined up to a blank line or a WikiText heading (" = Title = "), if long enough."""
    found = []
    lines = []
    for line in text.split("\n") + [""]:
        is_heading = line.startswith(" = ") and line.rstrip().endswith(" =")
        if line.strip() and not is_heading:
            lines.append(line.strip())
            continue
        found.append("\n".join(lines))
        lines = []
    return [paragraph for paragraph in found if len(paragraph) >= SHORTEST]


def _fetch_wikitext() -> str:
    """WikiText-2's raw test text, from the hub or the hub client's cache. Raises UsageError."""
    others = f"use --dataset {DATASETS[0]} or --prompts FILE"
    try:
        file = Path(_fetch_archive())
    except CheckpointError as error:
        raise UsageError(f"{error}; {others}") from error
    try:
        return _unpack(read_bytes(file, WIKITEXT_BYTES)).decode("utf-8")
    except BROKEN_ARCHIVE as error:
        raise UsageError(f"{file} is not the WikiText-2 archive: {error}; {others}") from error


def _fetch_archive() -> str:
    """Where WikiText-2's archive is, once it is there. Raises CheckpointError."""
    with hub_client("wikitext2"):
        from huggingface_hub import HfApi, hf_hub_download

        commit = HfApi().resolve_revision(WIKITEXT_REPOSITORY, repo_type="dataset")
        return hf_hub_download(
            WIKITEXT_REPOSITORY, WIKITEXT_ZIP, repo_type="dataset", revision=commit
        )


def _unpack(archive: bytes) -> bytes:
    """The test text of WikiText-2's archive, whatever sizes it tells of. Raises what is in
    BROKEN_ARCHIVE."""
    with zipfile.ZipFile(BytesIO(archive)) as members:
        member = members.getinfo(WIKITEXT_FILE)
        if member.compress_type not in INFLATED_BY_PARTS:
            raise ValueError(f"{WIKITEXT_FILE} is not deflated")
        with members.open(member) as text:
            content = text.read(WIKITEXT_BYTES + 1)  # its checksum shows more than it tells of
    if len(content) > WIKITEXT_BYTES:
        raise ValueError(f"{WIKITEXT_FILE} has more than {WIKITEXT_BYTES:,} bytes")
    return content


def cut_prompts(
    texts: list[str],
    tokenizer: Tokenizer,
    vocab_size: int,
    n_tokens: int,
    n_prompts: int,
    shortest: int = 1,
) -> list[list[int]]:
    """n_prompts of the texts, evenly spread over them, as ids, each cut to n_tokens; as many as
    there are if they are fewer.

    shortest: texts of fewer tokens are left out first. Raises UsageError if none is left.
    """
    encoded = [encode(text, tokenizer, vocab_size) for text in texts]
    usable = [ids[:n_tokens] for ids in encoded if len(ids) >= shortest]
    if not usable:
        raise UsageError(f"the dataset has no prompt of {shortest} tokens or more")
    return spread(usable, n_prompts)


def spread(items: Sequence, n: int) -> list:
    """n of the items, evenly spread over them; all if they are fewer."""
    n = min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def lengthened(prompts: list[list[int]], pair: Pair, n_tokens: int) -> list[list[int]]:
    """Prompts of n_tokens: the shorter ones go on with what the target itself writes, sampled at
    temperature 1 from seed 0, so that they do not loop as its greedy text does.

    It is a model's text and no person's: a table made of it has to say so.
    """
    found = []
    for prompt in prompts:
        text = list(prompt)
        n_lacking = n_tokens - len(prompt)
        if n_lacking > 0:
            sampling = Sampling(temperature=1.0, seed=0)
            text += token_ids(Request(pair, prompt, Alone(), n_lacking, sampling=sampling).decode())
        found.append(text[:n_tokens])
    return found
