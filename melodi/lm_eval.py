"""The coat for lm-evaluation-harness: whole documents through one memory, not window by window.

- Rolling log-likelihood reads a document from its beginning to its end; nothing is cut.
- Requests that begin alike share what was read of their beginning (`prefixes`).
- Where nothing comes before a text, a line break does, as in `melodi generate`: every model knows
  it, while the end of a document is never followed by anything in training.
"""

import contextlib
import copy
import logging
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
except ImportError:
    raise ImportError(
        "tasks need lm-evaluation-harness, which is not installed: pip install '.[eval]'"
    ) from None

from melodi.config.training import Precision
from melodi.data.tokenizer import opening
from melodi.model import LanguageModel
from melodi.precision import autocast, resolve
from melodi.prefixes import Text, score
from melodi.stream import StreamReader

MAX_TOKENS = 256
"""To write where a task does not say."""
RESAMPLED = 1000
"""Times that samples are drawn again to estimate an error: its second digit is not needed."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What tasks call the tokens to write."""
SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
"""What a task may say of sampling."""


class MelodiLM(TemplateLM):
    """A model with its tokenizer, as `melodi.load` gives it."""

    def __init__(self, model: LanguageModel, rows: int = 8) -> None:
        super().__init__()
        self.model, self.rows = model, rows
        self._device = model.embedding.weight.device

    @property
    def eot_token_id(self) -> int:
        end = self.model.tokenizer.end_of_document
        return self.prefix_token_id if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """What comes before a text that nothing comes before."""
        return opening(self.model.tokenizer)[-1]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        return self.model.tokenizer.encode(string)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """As the harness does it, spaces before the border going with the continuation. A token
        that holds the end of one and the beginning of the other counts as continuation: cut by the
        length of the context alone, there might be nothing left to score."""
        given = context.rstrip()
        alone, whole = self.tok_encode(given), self.tok_encode(context + continuation)
        same = takewhile(lambda pair: pair[0] == pair[1], zip(alone, whole, strict=False))
        first = sum(1 for _ in same)
        return whole[:first], whole[first:]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        pairs = []
        for context, continuation in (request.args for request in requests):
            if context.strip():
                given, scored = self._encode_pair(context, continuation)
            else:
                given, scored = [], self.tok_encode(context + continuation)
            pairs.append(((context, continuation), given, scored))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        texts = []
        for _pair, given, scored in requests:
            before = given or [self.prefix_token_id]
            texts.append(Text(before + scored, first=len(before)))
        self._score(texts, disable_tqdm)
        return [(-text.nats, text.greedy) for text in texts]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        before = [self.prefix_token_id]
        texts = [Text(before + self.tok_encode(request.args[0]), 1) for request in requests]
        self._score(texts, disable_tqdm)
        return [-text.nats for text in texts]

    def _score(self, texts: list[Text], disable_tqdm: bool) -> None:
        quiet = True if disable_tqdm else None  # None: a bar on terminals only
        with tqdm(total=len(texts), desc="reading", disable=quiet) as bar:
            score(self.model, texts, self.rows, bar.update)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        contexts = [self.tok_encode(request.args[0]) for request in requests]
        said = [""] * len(requests)
        read: tuple[list[int], StreamReader] = [], StreamReader(self.model)
        quiet = True if disable_tqdm else None
        # In order, so that a context that goes on from the one before is read from there.
        for i in tqdm(sorted(range(len(requests)), key=contexts.__getitem__), disable=quiet):
            read = self._read_on(read, contexts[i] or [self.prefix_token_id])
            said[i] = self._continuation(copy.copy(read[1]), dict(requests[i].args[1]))
        return said

    def _read_on(
        self, read: tuple[list[int], StreamReader], ids: list[int]
    ) -> tuple[list[int], StreamReader]:
        """A reader that has read `ids`, from the one that has read others if that is possible."""
        before, reader = read
        if ids[: len(before)] != before:
            before, reader = [], StreamReader(self.model)
        if len(ids) > len(before):
            reader.read(ids[len(before) :])
        return ids, reader

    def _continuation(self, reader: StreamReader, wanted: dict[str, Any]) -> str:
        wanted = {name: value for name, value in wanted.items() if value is not None}
        until = wanted.pop("until", [])
        limits = [wanted.pop(name) for name in LIMITS if name in wanted]
        sampled = wanted.pop("do_sample", wanted.get("temperature", 0) > 0)
        if wanted.get("num_beams") == 1:  # which is none
            del wanted["num_beams"]
        odd = sorted(wanted.keys() - SAMPLING)
        if odd:
            raise ValueError(
                f"generation_kwargs {odd[0]}={wanted[odd[0]]!r} is unknown: use until, "
                f"max_gen_toks, do_sample, {', '.join(sorted(SAMPLING))}"
            )
        # The harness seeds torch's own generator, and one number of it seeds each text.
        choices = {"temperature": 1.0, **wanted} if sampled else {"temperature": 0.0}
        seed = int(torch.randint(1 << 31, ())) if sampled else None
        stop = self.model.tokenizer.end_of_document
        until = [text for text in ([until] if isinstance(until, str) else until) if text]
        limit = limits[0] if limits else MAX_TOKENS
        return "".join(
            reader.generate_text(limit, **choices, seed=seed, stop=stop, stop_strings=until)
        )


def evaluate_tasks(
    model: LanguageModel,
    tasks: Sequence[str],
    include: Path | None = None,
    rows: int = 8,
    precision: Precision = "fp32",
) -> dict[str, Any]:
    """What the harness says of tasks by name: its figures, versions and numbers of samples.

    `include` is a folder of tasks of one's own.
    """
    from lm_eval.evaluator import simple_evaluate

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    device, config = model.embedding.weight.device, model.config
    numbers = autocast(resolve(precision, device, config), device)
    with numbers, contextlib.redirect_stdout(sys.stderr):  # standard output is for results alone
        found = simple_evaluate(
            model=MelodiLM(model, rows),
            tasks=list(tasks),
            task_manager=manager(tasks, include),
            log_samples=False,
            bootstrap_iters=RESAMPLED,
        )
    assert found is not None  # there is one process
    return {
        "tasks": found["results"],
        "versions": found["versions"],
        "samples": {name: count["effective"] for name, count in found["n-samples"].items()},
        "lm_eval": found["lm_eval_version"],
    }


def manager(tasks: Sequence[str], include: Path | None) -> Any:
    """Knows the tasks of a folder; the harness's own, whose list takes long to read, if need be."""
    from lm_eval.tasks import TaskManager

    if include is not None and not include.is_dir():
        raise FileNotFoundError(f"--include {include} is no folder: give one that holds *.yaml")
    own = TaskManager(include_path=include, include_defaults=False)
    if set(tasks) <= set(own.all_tasks):
        return own
    all_ = TaskManager(include_path=include)
    unknown = sorted(set(tasks) - set(all_.all_tasks))
    if unknown:
        raise ValueError(
            f"task {unknown[0]!r} is unknown to lm-evaluation-harness: name one of its tasks, or "
            "give the folder of your own with --include DIR"
        )
    return all_
