"""A package as verifiers 0.4 knows them, in one file, with tools: a server for all episodes, and
one for each."""

import verifiers.v1 as vf

__all__ = ["CounterTaskset"]


class Shelf(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "shelf"

    @vf.tool
    def size(self, name: str) -> int:
        """How many letters a name has."""
        return len(name)


class Pad(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "pad"

    async def setup(self) -> None:
        self.notes: list[str] = []

    @vf.tool
    def note(self, text: str) -> str:
        """Notes a text and returns all that were noted."""
        self.notes.append(text)
        return ", ".join(self.notes)


class CounterTask(vf.Task):
    @classmethod
    def toolsets(cls, config):
        return [Pad(vf.ToolsetConfig())]

    @vf.reward
    async def used(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class CounterTaskset(vf.Taskset[CounterTask]):
    @classmethod
    def toolsets(cls, config):
        return [Shelf(vf.SharedToolsetConfig())]

    def load(self):
        return [CounterTask(vf.TaskData(prompt="Count."), self.config.task)]


if __name__ == "__main__":
    import os

    (Pad if '"colocated"' in os.environ["VF_CONFIG"] else Shelf).run()
