#!/bin/bash
python3 - <<'END'
import csv, json
from collections import defaultdict

regions, products, rows = defaultdict(float), defaultdict(float), 0
for sale in csv.DictReader(open("/app/sales.csv")):
    if sale["units"]:
        amount = int(sale["units"]) * float(sale["price"])
        regions[sale["region"]] += amount
        products[sale["product"]] += amount
        rows += 1
report = {
    "rows": rows,
    "revenue": round(sum(regions.values()), 2),
    "by_region": {name: round(amount, 2) for name, amount in regions.items()},
    "best_product": max(products, key=products.get),
}
json.dump(report, open("/app/report.json", "w"))
END
