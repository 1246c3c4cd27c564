"""A package as verifiers 0.4 knows them, in one file: two agents play one episode."""

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]


def points(text: str) -> float:
    return float(ord(text[0])) if text else 0.0


class DuelTaskset(vf.Taskset[vf.Task]):
    def load(self):
        for number in range(4):
            yield vf.Task(vf.TaskData(prompt=f"Duel {number}."), self.config.task)


class DuelConfig(vf.EnvConfig):
    left: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    right: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    referee: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"})
    judged: bool = False


class DuelEnv(vf.Env[DuelConfig]):
    """Left speaks, right answers; what one gains the other loses."""

    async def setup(self, agents):
        agents.referee.trainable = False

    async def run(self, task, agents):
        left = await agents.left.run(task)
        said = vf.TaskData(prompt=f"Left said {left.last_reply!r}.", system_prompt="You are right.")
        right = await agents.right.run(vf.Task(said))
        if self.config.judged:
            await agents.referee.run(vf.Task(vf.TaskData(prompt="Who won?")))
        gain = points(left.last_reply) - points(right.last_reply)
        left.record_reward("gain", gain)
        right.record_reward("gain", -gain)
        left.record_metric("points", points(left.last_reply))
