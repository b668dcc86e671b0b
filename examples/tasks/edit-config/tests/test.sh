#!/bin/bash
# A link in the place of the file would lead to the expected one.
if dd if=/app/server.ini iflag=nofollow status=none | cmp --silent - /tests/expected.ini; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
