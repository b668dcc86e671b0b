"""Conformance of a server to the Tinker protocol: each endpoint and option, tried through the Tinker SDK.

    report = check_service(url, api_key=key)
    print(report.ok, [result for result in report.results if result.status != "works"])

Invariant: an expected number is a formula of other answers of the same server, so no reference implementation is
needed. The checks leave no checkpoint behind, unless the server cannot delete one.
"""

from rlkit.conformance.report import CheckResult, ServiceReport
from rlkit.conformance.suite import check_service

__all__ = ["CheckResult", "ServiceReport", "check_service"]
