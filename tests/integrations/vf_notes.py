"""A package as verifiers 0.4 knows them, in one file, with a harness of its own: it asks twice, and
the second time shows only what it noted."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.runtimes import ProgramResult

__all__ = ["NotesHarness", "NotesTaskset"]


class NotesTask(vf.Task):
    @vf.reward
    async def ends(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "end")


class NotesTaskset(vf.Taskset[NotesTask]):
    def load(self):
        return [NotesTask(vf.TaskData(prompt="Begin."), self.config.task)]


class NotesHarness(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as http:
            prompt = data.prompt
            for _ in range(2):
                messages = [{"role": "user", "content": prompt}]
                body = {"model": ctx.model, "messages": messages, "stream": True}
                reply = await http.post(f"{endpoint}/chat/completions", json=body, timeout=60)
                reply.raise_for_status()
                prompt = f"You noted {trace.last_reply!r}."
        return ProgramResult(exit_code=0, stdout="", stderr="")
