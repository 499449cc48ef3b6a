"""The workflow that builds the images agrees with the Dockerfile and the tree."""

import re
import shutil
import subprocess

import pytest
import yaml
from shell import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "images.yml"


@pytest.fixture(scope="module")
def workflow():
    return yaml.safe_load(WORKFLOW.read_text())


def steps(workflow, job):
    return workflow["jobs"][job]["steps"]


def test_the_workflow_builds_every_target_for_amd64_and_arm64(workflow):
    matrix = workflow["jobs"]["build"]["strategy"]["matrix"]
    assert matrix["platform"] == ["linux/amd64", "linux/arm64"]
    assert {one["platform"]: one["arch"] for one in matrix["include"]} == {
        "linux/amd64": "amd64",
        "linux/arm64": "arm64",
    }
    assert matrix["target"] == workflow["jobs"]["publish"]["strategy"]["matrix"]["target"] == ["cpu", "cuda"]
    dockerfile = (ROOT / "ops" / "Dockerfile").read_text()
    assert set(matrix["target"]) <= set(re.findall(r"^FROM \S+ AS (\w+)$", dockerfile, re.M))


def test_the_files_that_the_workflow_names_exist(workflow):
    [build] = [
        step
        for step in steps(workflow, "build")
        if step.get("uses", "").startswith("docker/build-push-action")
    ]
    events = workflow[True]  # YAML reads the key `on` as a truth
    named = [build["with"]["file"], *events["pull_request"]["paths"]]
    assert len(named) == 6 and all((ROOT / name).is_file() for name in named)


def test_only_a_release_publishes(workflow):
    events = workflow[True]
    assert events["release"] == {"types": ["published"]} and set(events) == {
        "release",
        "pull_request",
        "workflow_dispatch",
    }
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["jobs"]["publish"]["if"] == "github.event_name == 'release'"
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            if step.get("uses", "").startswith("docker/login-action") and job is workflow["jobs"]["build"]:
                assert step["if"] == "github.event_name == 'release'"


def test_the_image_is_heard_before_it_gets_a_name(workflow):
    [speaks] = [step for step in steps(workflow, "build") if step.get("name") == "Speak"]
    words = speaks["run"].split('"$BUILT" ')[1]
    assert words == 'say "It works." --device cpu -o /tmp/works.wav'
    assert workflow["jobs"]["publish"]["needs"] == "build"


def test_actionlint_accepts_the_workflow():
    path = shutil.which("actionlint")
    if path is None:
        pytest.skip("actionlint is not installed")
    done = subprocess.run([path, WORKFLOW], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
