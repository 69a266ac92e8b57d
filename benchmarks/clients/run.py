"""Run the libraries that are installed, of those that use Lightning, plainly and with streamed models.

    python benchmarks/clients/run.py [NAME ...] [--page docs/works-with.md]

Each client trains a tiny model of its own library, with that library's trainer, on data made on the spot. Prints a
table: library, version, where the strategy is passed, what it needs, result. ``--page`` writes the rows into a page,
in place of those of the same libraries; so the page may collect what was run in several environments. The exit status
is 1 if a result differs or a client fails.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import os
import pathlib
import re
import sys
import warnings

if not __package__:  # run as a script: from beside the clients, their modules would hide what they import
    sys.path[0] = str(pathlib.Path(__file__).parents[1])
from clients import forecasting, language, science, tables, vision  # noqa: F401
from clients.harness import CLIENTS, Client, Unequal, compare

COLUMNS = ("library", "version", "Lightning", "where users write the strategy", "also needs", "result")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|"
BEGIN, END = "<!-- clients -->", "<!-- end of clients -->"


def row(client: Client, result: str) -> str:
    """A client's line of the table."""
    distribution = "lightning" if client.package == "fabric" else client.package
    package = f"{'Fabric' if client.package == 'fabric' else distribution} {importlib.metadata.version(distribution)}"
    cells = (client.library, client.version, package, client.passed, client.needs, result)
    return f"| {' | '.join(map(str, cells))} |"


def tried(client: Client) -> tuple[str, bool]:
    """A client's result, and whether it is good."""
    try:
        return compare(client), True
    except Unequal as error:
        return str(error), False
    except Exception as error:
        logging.getLogger(__name__).exception("%s failed", client.library)
        return f"fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}", False


def merged(text: str, rows: dict[str, str]) -> str:
    """A page with these rows in its table, in the order of the clients."""
    found = re.search(f"{BEGIN}\n(.*?){END}", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"the page has no table between {BEGIN} and {END}")
    there = {line.split(" | ")[0].strip("| "): line for line in found[1].splitlines()[3:]}
    lines = [line for name in CLIENTS if (line := rows.get(name, there.get(name)))]
    return text[: found.start()] + "\n".join([f"{BEGIN}\n\n{HEAD}", *lines, f"\n{END}"]) + text[found.end() :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--page", type=pathlib.Path, help="a page in which rows are put")
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*CLIENTS}:
        parser.error(f"no client is called {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    clients = [CLIENTS[name] for name in arguments.names or CLIENTS]
    rows, good = {}, True
    print(HEAD)
    for client in clients:
        if client.version is None:
            continue
        result, fine = tried(client)
        good = good and fine
        rows[client.library] = row(client, result)
        print(rows[client.library], flush=True)
    if missing := [client.library for client in clients if client.version is None]:
        print(f"\nnot installed: {', '.join(missing)}")
    if arguments.page is not None:
        arguments.page.write_text(merged(arguments.page.read_text(), rows))
    raise SystemExit(not good)


if __name__ == "__main__":
    os.environ.setdefault("PL_DISABLE_TIPS", "1")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    main()
