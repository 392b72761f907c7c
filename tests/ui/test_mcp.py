"""The page as a tool for language models: an MCP client lists it and calls it."""

import ast
import asyncio

import pytest

pytest.importorskip("mcp")


def test_a_client_calls_the_tool(address) -> None:
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    async def ask() -> tuple[list, dict]:
        async with (
            streamable_http_client(f"{address.rstrip('/')}/gradio_api/mcp/") as (read, write, _),
            ClientSession(read, write) as session,
        ):
            await session.initialize()
            tools = (await session.list_tools()).tools
            name = next(tool.name for tool in tools if tool.name.endswith("generate"))
            answer = await session.call_tool(
                name, {"prompt": "Name three fruits.", "max_new_tokens": 12, "drafter": "nano", "temperature": 0}
            )
            return tools, ast.literal_eval(answer.content[0].text)  # Gradio writes it as Python does

    tools, found = asyncio.run(asyncio.wait_for(ask(), 120))
    assert len(tools) == 1  # what the page itself calls is no tool
    assert "speculatively" in tools[0].description
    assert {"prompt", "gamma", "rule"} <= tools[0].inputSchema["properties"].keys()
    assert found["text"]
    assert sum(len(round["drafted"]) for round in found["trace"]["rounds"]) > 0
