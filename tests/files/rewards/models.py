"""Two pydantic models that name each other."""

from __future__ import annotations

from pydantic import BaseModel


class Step(BaseModel):
    text: str
    proof: Proof | None = None


class Proof(BaseModel):
    steps: list[Step]


def score(prompt, response, answer, metadata):
    proof = Proof.model_validate({"steps": [{"text": response, "proof": {"steps": []}}]})
    return float(proof.steps[0].text == answer)
