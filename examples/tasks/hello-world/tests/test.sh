#!/bin/bash
# Exactly that line, with or without a newline at its end.
if [ "$(cat /app/hello.txt 2>/dev/null)" = "Hello, world!" ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
