"""Grade each number of the report separately; the form alone earns nothing."""

import csv
import json
from collections import defaultdict
from pathlib import Path

REWARDS = Path("/logs/verifier/reward.json")


def expected():
    regions, products, rows = defaultdict(float), defaultdict(float), 0
    with Path("/tests/sales.csv").open() as file:
        for sale in csv.DictReader(file):
            if sale["units"]:
                amount = int(sale["units"]) * float(sale["price"])
                regions[sale["region"]] += amount
                products[sale["product"]] += amount
                rows += 1
    best = max(products, key=products.get)
    return {"rows": rows, "revenue": sum(regions.values()), "by_region": dict(regions), "best_product": best}


def close(number, right):
    return isinstance(number, int | float) and not isinstance(number, bool) and abs(number - right) < 0.005


def main():
    right = expected()
    try:
        report = json.loads(Path("/app/report.json").read_text())
    except (OSError, ValueError):
        report = None
    rewards = {}
    fields = report if isinstance(report, dict) else {}
    regions = fields.get("by_region")
    rewards["rows"] = float(fields.get("rows") == right["rows"])
    rewards["revenue"] = float(close(fields.get("revenue"), right["revenue"]))
    rewards["by_region"] = float(
        isinstance(regions, dict)
        and regions.keys() == right["by_region"].keys()
        and all(close(regions[name], amount) for name, amount in right["by_region"].items())
    )
    rewards["best_product"] = float(fields.get("best_product") == right["best_product"])
    rewards["reward"] = sum(rewards.values()) / len(rewards)
    rewards["valid_json"] = float(isinstance(report, dict))
    REWARDS.write_text(json.dumps(rewards))


main()
