#!/bin/bash
reward=0
pid=$(cat /app/server.pid 2>/dev/null)
if [[ "$pid" =~ ^[0-9]+$ ]] && kill -0 "$pid" 2>/dev/null && python3 /tests/fetch.py; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
