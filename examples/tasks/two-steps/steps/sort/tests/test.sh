#!/bin/bash
if [ "$(cat /app/sorted.txt 2>/dev/null)" = "$(printf 'pear\nfig\napple\nbanana')" ]; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
