"""Serve both environments, or one of them, by the Open Reward Standard:

python examples/openreward_env/server.py
python examples/openreward_env/server.py lookup --port 8081
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OPENREWARD_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("OPENREWARD_LOG_LEVEL", "ERROR")

import uvicorn
from lookup import Lookup
from openreward.environments import Environment, Server
from word_game import WordGame

ENVIRONMENTS: dict[str, type[Environment]] = {"wordgame": WordGame, "lookup": Lookup}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(ENVIRONMENTS), help=", ".join(ENVIRONMENTS))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    arguments = parser.parse_args()
    chosen = [ENVIRONMENTS[name] for name in arguments.names]
    uvicorn.run(Server(chosen).app, host=arguments.host, port=arguments.port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
