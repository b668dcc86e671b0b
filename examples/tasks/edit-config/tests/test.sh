#!/bin/bash
if cmp --silent /app/server.ini /tests/expected.ini; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
