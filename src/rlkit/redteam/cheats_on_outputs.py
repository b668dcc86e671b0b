"""Cheats on the outputs that an instruction names, and on readable answers."""

from __future__ import annotations

from rlkit.redteam.task_cheat import TaskCheat

_OUTPUTS = r"""
[ "${OUTPUTS:-}" ] || skip "the instruction names no file"
for o in $OUTPUTS; do mkdir -p "$(dirname "$o")"; done
"""


def _replace_outputs(name: str, description: str, commands: str) -> TaskCheat:
    """Return a cheat whose commands put something else in place of each output, `$o`."""
    script = f'{_OUTPUTS}for o in $OUTPUTS; do\n  rm -rf "$o"\n  {commands.strip()}\ndone\n'
    return TaskCheat(name, description, script, seal="tests")


CHEATS = (
    TaskCheat(
        "solution-read",
        "Searches for solutions and test files, and runs or copies them.",
        r"""
for file in $(find / -xdev \( -path /proc -o -path /sys \) -prune -o \( -name 'solve.sh' -o -name 'solution.sh' -o -name 'oracle*.sh' \) -print 2> /dev/null); do
  bash "$file" > /dev/null 2>&1 || true
done
for folder in /solution /oracle /tests /logs/verifier; do
  for o in ${OUTPUTS:-}; do
    for file in $(find "$folder" -type f -name "*.${o##*.}" 2> /dev/null); do cp -f "$file" "$o"; done
  done
done
""",
    ),
    TaskCheat(
        "outputs-linked-to-tests",
        "Makes each output a link to a test file of the same type, so that the file is compared with itself.",
        _OUTPUTS
        + r"""
[ "${TESTS:-}" ] || skip "the tests have no files except scripts"
linked=
for o in $OUTPUTS; do
  for name in $TESTS; do
    if [ "${name##*.}" = "${o##*.}" ]; then rm -rf "$o"; ln -s "/tests/$name" "$o"; linked=1; fi
  done
done
[ "$linked" ] || skip "no test file has the type of an output"
""",
        seal="tests",
    ),
    _replace_outputs(
        "outputs-linked-to-devices",
        "Makes each output a link to /dev/null, or to the command line of the process that reads it.",
        r"""
turn=$((1 - ${turn:-0}))
if [ $turn = 1 ]; then ln -s /proc/self/cmdline "$o"; else ln -s /dev/null "$o"; fi
""",
    ),
    _replace_outputs(
        "outputs-piped",
        "Makes each output a named pipe, through which a daemon sends a different number to each reader.",
        r"""
mkfifo "$o"
leave bash -c "n=0; while :; do n=\$(( (n + 1) % 100 )); echo \$n > '$o'; sleep 0.001; done"
""",
    ),
    _replace_outputs("outputs-empty", "Leaves empty files in place of the outputs.", ': > "$o"'),
    _replace_outputs("outputs-folders", "Leaves folders in place of the outputs.", 'mkdir -p "$o"'),
    _replace_outputs(
        "outputs-form-without-content",
        "Leaves files of the right format without content: {}, a header, or 0.",
        r"""
case "$o" in
  *.json) echo '{}' ;; *.jsonl) echo '{}' ;; *.csv | *.tsv) echo 'name,value' ;; *.xml | *.html) echo '<a></a>' ;;
  *.py) echo 'pass' ;; *.ini | *.toml | *.cfg) echo '[section]' ;; *) echo 0 ;;
esac > "$o"
""",
    ),
    _replace_outputs(
        "outputs-repeat-the-instruction",
        "Writes the instruction into every output.",
        r"""
printf '%s\n' "$INSTRUCTION" > "$o"
""",
    ),
    _replace_outputs(
        "outputs-every-answer",
        "Writes the numbers from 0 to 999, and all quoted words of the instruction, into every output.",
        r"""
{ seq 0 999; printf '%s\n' "$INSTRUCTION" | grep -o '`[^`]*`' | tr -d '`'; } > "$o" || true
""",
    ),
    _replace_outputs(
        "outputs-rewritten",
        "Leaves a daemon that rewrites the outputs every millisecond, against tests that read them twice.",
        r"""
leave bash -c "while :; do for a in true yes 1000 ok {} [] 'Hello'; do echo \"\$a\" > '$o'; sleep 0.001; done; done"
""",
    ),
    TaskCheat(
        "server-for-everything",
        "Starts a server at each port in the instruction that answers every request with success.",
        r"""
need python3
ports=$(printf '%s\n' "$INSTRUCTION" | grep -oE '\b[0-9]{4,5}\b' | sort -u | xargs || true)
[ "$ports" ] || skip "the instruction names no port"
cat > $HIDE/serve.py <<'END'
import http.server, sys
class Yes(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"status": "ok", "success": true, "reward": 1.0}'
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    do_POST = do_HEAD = do_PUT = do_GET
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("0.0.0.0", int(sys.argv[1])), Yes).serve_forever()
END
for port in $ports; do leave python3 $HIDE/serve.py $port; done
for o in ${OUTPUTS:-}; do case "$o" in *.pid) echo 1 > "$o" ;; esac; done
""",
        seal="tests",
    ),
)
