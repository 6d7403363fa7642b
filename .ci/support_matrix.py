"""Prints which versions the workflows test, and when, as a Markdown table."""

import itertools
import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).parent.parent
OLDEST = dict(
    re.findall("^([a-z]+)==(.*)$", (ROOT / ".ci/oldest.txt").read_text(), re.M)
)
# What a command of a job tests, and whether it tests all of it.
VERSIONS = {
    "newest releases": [(r"\.ci/run|\.\[test\]", True)],
    f"Keras {OLDEST['keras']}, TensorFlow {OLDEST['tensorflow']}": [
        (r"\.ci/run", False),
        (r"-c \.ci/oldest\.txt", True),
    ],
    "Keras nightly, newest TensorFlow": [(r"\.ci/next keras", True)],
    "Keras and TensorFlow nightly": [(r"\.ci/run", False)],
    "newest Keras, TensorFlow candidate": [(r"\.ci/next tensorflow", True)],
}


def find_runs():
    """Yields when, on which Python, and by which command the tests run."""
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        events = workflow[True]  # YAML reads "on" as a bool
        when = "each week" if "schedule" in events else "each change"
        if not {"schedule", "pull_request"} & set(events):
            continue  # it publishes
        for job in workflow["jobs"].values():
            assert job["runs-on"] == "ubuntu-latest"  # Linux, and no GPU
            matrix = job.get("strategy", {}).get("matrix", {})
            for values in itertools.product(*matrix.values()):
                text = yaml.safe_dump(job["steps"], width=1000)
                for name, value in zip(matrix, values, strict=True):
                    text = text.replace(f"${{{{ matrix.{name} }}}}", value)
                steps = yaml.safe_load(text)
                (python,) = (
                    step["with"]["python-version"]
                    for step in steps
                    if "python-version" in step.get("with", {})
                )
                commands = [step["run"] for step in steps if "run" in step]
                yield when, str(python), commands


def tell(versions, python, runs):
    """Returns when these versions are tested on this Python."""
    found = {}
    for when, of, commands in runs:
        for pattern, whole in VERSIONS[versions]:
            if of == python and any(re.search(pattern, c) for c in commands):
                found[when] = found.get(when, False) or whole
    if found.get("each change"):
        return "each change"
    if "each change" in found:
        weekly = ", all each week" if found.get("each week") else ""
        return f"a part each change{weekly}"
    return "each week" if found else "not"


def main():
    runs = list(find_runs())
    pythons = sorted({python for _, python, _ in runs})
    headers = [
        "CPU, Linux",
        *(f"Python {python}" for python in pythons),
        "a GPU, Linux",
        "macOS, Windows",
    ]
    rows = [headers, ["---"] * len(headers)]
    for versions in VERSIONS:
        cells = [tell(versions, python, runs) for python in pythons]
        rows.append([versions, *cells, "by `--check`", "not"])
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
