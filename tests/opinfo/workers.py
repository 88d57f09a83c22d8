"""Worker processes that check one operator of the database at a time each."""

from __future__ import annotations

import argparse
import ast
import contextlib
import multiprocessing
import queue
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

import torch

from minicompile.options import Options, make_options
from tests.opinfo.cases import cases, database
from tests.opinfo.compare import Way, check


@dataclass
class Row:
    """One verdict without what can't travel between processes."""

    case: str
    variant: str
    dtype: str
    wrong: str
    in_graph: bool
    breaks: list[str]


@dataclass
class Result:
    """All verdicts of one operator; `error` where there are none, or not all."""

    op: str
    rows: list[Row] = field(default_factory=list)
    error: str = ""


def check_operator(name: str, chosen: argparse.Namespace) -> Result:
    result, way = Result(name), Way(chosen.backend, chosen.dynamic, options_of(chosen))
    variants, kinds = tuple(chosen.variants.split(",")), tuple(chosen.kinds.split(","))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for case in cases(database()[name], variants, kinds, chosen.samples):
                v = check(case, way)
                about = case.name, case.variant, str(case.dtype)
                result.rows.append(Row(*about, v.wrong, v.in_graph, v.breaks))
        except Exception:
            result.error = traceback.format_exc(limit=-4)
    return result


def options_of(chosen: argparse.Namespace) -> Options:
    """Verifying, and what was asked for; values are Python's, or else text."""
    options: dict[str, Any] = {"verify": True}
    for name, text in (given.split("=", 1) for given in chosen.option):
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return make_options(options=options)


def work(pipe: Any, chosen: argparse.Namespace) -> None:
    """Names come in, results go out."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(check_operator(pipe.recv(), chosen))


class Worker:
    """A process that checks one operator at a time; it is replaced if it dies or takes too long."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.start()

    def start(self) -> None:
        self.pipe, other = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=work, args=(other, self.chosen), daemon=True)
        self.process.start()
        other.close()

    def check(self, op: str) -> Result:
        try:
            self.pipe.send(op)
            if self.pipe.poll(self.chosen.timeout):
                return self.pipe.recv()
            error = f"no end after {self.chosen.timeout:g} s"
        except (EOFError, OSError):
            error = "the process died"
        self.process.kill()
        self.start()
        return Result(op, error=error)


def run_all(names: list[str], chosen: argparse.Namespace) -> list[Result]:
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    for _ in range(chosen.jobs):
        idle.put(Worker(chosen))

    def checked(name: str) -> Result:
        worker = idle.get()
        try:
            return worker.check(name)
        finally:
            idle.put(worker)

    results = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for future in as_completed([pool.submit(checked, name) for name in names]):
            results.append(future.result())
            wrong = sum(bool(row.wrong) for row in results[-1].rows)
            if wrong or results[-1].error or len(results) % 25 == 0:
                print(f"[{len(results)}/{len(names)}] {results[-1].op}: {wrong} wrong", flush=True)
    return results
