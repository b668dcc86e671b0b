#!/bin/bash
# What the record of an agent looks like that was understood.
echo '{"steps": [{"source": "agent", "message": "", "tool_calls": [{"function_name": "bash_command"}]}]}' \
    > /logs/agent/trajectory.json
