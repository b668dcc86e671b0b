#!/bin/bash
# Do not follow a link: it could lead to the expected file.
if dd if=/app/server.ini iflag=nofollow status=none | cmp --silent - /tests/expected.ini; then reward=1; else reward=0; fi
echo "$reward" > /logs/verifier/reward.txt
