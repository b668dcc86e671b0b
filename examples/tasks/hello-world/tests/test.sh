#!/bin/bash
# The file must contain exactly this line, with or without a final newline.
if [ "$(cat /app/hello.txt 2>/dev/null)" = "Hello, world!" ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
