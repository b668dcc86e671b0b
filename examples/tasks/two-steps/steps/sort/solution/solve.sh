#!/bin/bash
sort /app/words.txt | uniq -c | sort -k1,1nr -k2 | awk '{print $2}' > /app/sorted.txt
