#!/bin/bash
cd /app
nohup python3 -m http.server 8765 --bind 127.0.0.1 > /tmp/server.log 2>&1 &
echo $! > /app/server.pid
