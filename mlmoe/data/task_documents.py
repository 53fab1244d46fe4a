"""Examples of the synthetic tasks as training documents: the source 'tasks'.

`data.path` names the tasks, with the longest example in tokens where that is not the context:

    --config.data.mixture='(("stdlib","",0.7),("tasks","passkey,needle_multi",0.3))'
    --config.data.mixture='(("stdlib","",0.7),("tasks","passkey,needle_multi:2048",0.3))'

Nothing is stored: document i is made when it is read, a function of i alone. Tasks take turns;
lengths are log-uniform from the shortest example up; depths are uniform, a tenth of the
examples at each end: of uniform ones in a long text hardly any is the first sentence. Set
`--config.data.packing=best_fit`: 'split' cuts many of the longer examples in two, and one whose
answer is in another row than its question teaches nothing.
"""

import numpy as np

from mlmoe.data.documents import Document, content_bytes, row_keys, stable_hash
from mlmoe.data.tasks import SHORTEST, TASKS, TEXT_TASKS, training_example
from mlmoe.data.tokenizers import Tokenizer
from mlmoe.errors import UserError

DOCUMENTS = 2**16


class TaskDocuments:
    """65,536 examples, without bos and eos: text, or int32 ids for the tasks over symbols."""

    split_by_name = False

    def __init__(self, path: str, context: int, tokenizer: Tokenizer):
        if tokenizer.fingerprint != "bytes":
            message = (
                f"source 'tasks' ({path}) is written in bytes and needs data.tokenizer='bytes'"
            )
            raise UserError(f"{message}; the tokenizer given has {tokenizer.vocab_size:,} ids")
        self._tokenizer = tokenizer
        self._tasks, longest = parse_tasks(path, context)
        low = np.array([SHORTEST[name] for name in self._tasks])[np.arange(DOCUMENTS) % self._n]
        rng = np.random.default_rng(0)
        spread = rng.random(DOCUMENTS) * np.log((longest + 1) / low)
        self._lengths = np.minimum(low * np.exp(spread), longest).astype(np.int64)
        self._depths = np.clip(rng.uniform(-0.125, 1.125, DOCUMENTS), 0.0, 1.0)
        self.n_bytes = int(self._lengths.sum()) - 2 * DOCUMENTS  # at most: examples may be shorter
        # The first examples stand for how all are made: a change of that is another corpus.
        first = b"".join(content_bytes(self[i]) for i in range(2 * self._n))
        name = f"{','.join(self._tasks)}:{longest} {stable_hash(first):x}"
        self.files: tuple[tuple[str, int], ...] = ((name, DOCUMENTS),)

    @property
    def _n(self) -> int:
        return len(self._tasks)

    def __len__(self) -> int:
        return DOCUMENTS

    def __getitem__(self, index: int) -> Document:
        task, length = self._tasks[index % self._n], int(self._lengths[index])
        depth = float(self._depths[index])
        ids = training_example(task, length, number=index, depth=depth).tokens[1:-1]
        return self._tokenizer.decode(ids) if task in TEXT_TASKS else ids

    def name(self, index: int) -> str:
        return f"{self._tasks[index % self._n]}:{index}"

    def keys(self) -> np.ndarray:
        return row_keys([("tasks", DOCUMENTS)])

    def sizes(self) -> np.ndarray:
        return self._lengths


def parse_tasks(path: str, context: int) -> tuple[list[str], int]:
    """'a,b:2048' to ['a', 'b'] and 2048; the context where no length is given.

    Raises:
      UserError: there is no such task, it does not fit, or the length is not one of a row.
    """
    names, colon, number = path.partition(":")
    tasks = [name.strip() for name in names.split(",")]
    for name in tasks:
        if name not in TASKS:
            message = f"data.path={path!r}: there is no task {name!r}"
            raise UserError(f"{message}; choose from {', '.join(TASKS)}")
    if colon and not number.strip().isdecimal():
        message = f"data.path={path!r}: the longest example {number!r} is no whole number"
        raise UserError(f"{message}; write it as {names}:{context}")
    longest = int(number) if colon else context
    if longest > context:
        message = f"data.path={path!r}: examples of {longest} tokens do not fit in rows of"
        raise UserError(f"{message} {context}; nearest valid: {context}")
    what = "longest example" if colon else "context"
    for name in tasks:
        if longest < SHORTEST[name]:
            message = f"data.path={path!r}: {name} does not fit in a {what} of {longest} tokens"
            raise UserError(f"{message}; nearest valid: {SHORTEST[name]}")
    return tasks, longest
