#!/bin/bash
chmod 700 /tests
if python3 -I /tests/hidden.py; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
