"""Exit with code 0 if the server returns the file."""

import sys
import time
import urllib.request
from pathlib import Path

URL = "http://127.0.0.1:8765/status.json"
ATTEMPTS = 10

for _ in range(ATTEMPTS):
    try:
        with urllib.request.urlopen(URL, timeout=5) as answer:
            sys.exit(answer.read() != Path("/tests/status.json").read_bytes())
    except OSError:  # it may need a moment to start
        time.sleep(0.2)
sys.exit(1)
