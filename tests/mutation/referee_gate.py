"""Faults of the gate: it compares too little, takes chance for change, or loses what it keeps."""

from __future__ import annotations

from fa_verify.diagnosis.mutant import Mutant, faults_of

__all__ = ["GATE"]

GATE: tuple[Mutant, ...] = (
    *faults_of(
        "properties/regression/bootstrap.py",
        "test_bootstrap",
        ("the ends are exchanged", "mean - float(above) * error", "mean - float(below) * error"),
        ("the level is twice as wide", "[level, 1 - level]", "[4 * level, 1 - 4 * level]"),
        ("percentiles without their tails", "found.append((again.mean(axis=1)[varied] - mean)",
         "found.append((again.mean(axis=1)[varied] - mean) * 0.5"),
        ("one difference is enough", "x.size < 2 or", "x.size < 1 or"),
    ),
    *faults_of(
        "properties/regression/drift.py",
        "test_drift",
        ("an improvement is an alarm", "alarm=interval.low > 0", "alarm=True"),
        ("what is worse is none", "alarm=interval.low > 0", "alarm=interval.high < 0"),
        ("the ratio is upside down", "_log_ratio(now.errors[output][1], then.errors[output][1])",
         "_log_ratio(then.errors[output][1], now.errors[output][1])"),
        ("masks are no groups", 'found[f"{output} {then.mask}"].append(ratio)', "pass"),
        ("few problems are a group", "if len(ratios) >= FEWEST", "if ratios"),
        ("beyond the bound is told alone", "alarm=now[name] > 1", "alarm=False"),
        ("a problem that is not judged is told alone",
         'f"{problems} not judged as then: {reason}", alarm=True',
         'f"{problems} not judged as then: {reason}", alarm=False'),
        ("what vanished is still there", "for name in sorted(had.keys() - has):",
         "for name in sorted(has - had.keys()):"),
        ("a check that is not made is made", 'if kind != "guarantee" or i not in reasons', ""),
    ),
    *faults_of(
        "properties/regression/speed_ratio.py",
        "test_speed_ratio",
        ("any loss counts", "self.median < 1 - LOSS and", "self.median < 1 and"),
        ("noise counts", "self.median < 1 - LOSS and self.high < 1", "self.median < 1 - LOSS"),
        ("then and now are exchanged", "for rounds in (now, then)", "for rounds in (then, now)"),
        ("what is not timed is told alone",
         'yield Difference("speed", text, alarm=True)', 'yield Difference("speed", text)'),
    ),
    *faults_of(
        "properties/regression/compiled_kernels.py",
        "test_compiled_kernels",
        ("more spills are told alone", "after.spills > before.spills or any(", "any("),
        ("a new kernel may spill", "spills = after.spills > 0", "spills = False"),
        ("the last variant counts", "taken.most(found.get(name))", "taken"),
        ("shared memory is not compared", "(before.shared, after.shared),", ""),
    ),
    *faults_of(
        "properties/regression/baseline.py",
        "test_baseline",
        ("another version is read", "if version != VERSION:", "if version is None:"),
        ("it is written in place", "write_atomically(path, self._text())",
         "path.write_text(self._text())"),
        ("the check is lost", '_of(record, "check", str, where),', '"G1",'),
        ("NaN is a number", "any(not 0 <= x < math.inf for x in numbers)",
         "any(x < 0 for x in numbers)"),
        ("another device is the same", '("device", self.device, other.device),', ""),
    ),
    *faults_of(
        "properties/regression/measurement.py",
        "test_measurement",
        ("NaN is no error", "math.inf if math.isnan(x) else x", "0.0 if math.isnan(x) else x"),
        ("the spread is no unit", " | mean_squares(trial)", ""),
    ),
    *faults_of(
        "properties/comparison/heat_map.py",
        "test_heat_map",
        ("cells keep their mean", "adaptive_max_pool2d", "adaptive_avg_pool2d"),
        ("NaN is cold", "torch.where(head.isnan(), math.inf, head)",
         "torch.where(head.isnan(), 0.0, head)"),
        ("it is another head", "b, h = index[:2]", "b, h = index[0], 0"),
    ),
    *faults_of(
        "properties/execution/tally.py",
        "test_tally",
        ("bins of another process are lost", '        self.bins.update(record["bins"])\n', ""),
        ("a bin is that of another", "bisect_right(EDGES, peak)", "bisect_right(EDGES, 2 * peak)"),
    ),
)  # fmt: skip
