#!/bin/bash
sed -i 's/^port = 8080$/port = 9000/; s/^workers = 2$/workers = 8/' /app/server.ini
